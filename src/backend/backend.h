// Backend: every operation the engine needs, declared once.
//
// Conventions
//   * Tensors are contiguous. N is the number of tokens of a micro-batch (its sequences one after
//     another), H the hidden size, I the feed-forward size, V the vocabulary.
//   * Floating-point tensors are FP32 or BF16 (FP64 for tests); "compute type" below is FP32, or
//     FP64 when the tensors are FP64. BF16 operands are widened, sums are in the compute type.
//   * A *plain* operation is pure virtual. A *fused* one has a default body of plain ones, which is
//     its specification and the CPU's path; a backend may override it.
//   * A saved activation comes as a QuantTensor; an exact format is one case of it.
//   * A tensor that is marked optional may be left default-constructed.
//   * Shapes are checked: a mismatch throws Error naming the operation.
//   * On a measuring context (arenas that only measure) operations take their workspace and compute
//     nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/context.h"
#include "core/memory.h"
#include "core/tensor.h"
#include "quant/quant_counters.h"
#include "quant/quant_tensor.h"

namespace agoq {

enum class NormKind : std::uint8_t {
  kRmsNorm,    // y = x / sqrt(mean(x^2) + eps) * weight
  kLayerNorm,  // y = (x - mean(x)) / sqrt(var(x) + eps), no parameters (OLMo)
};

enum class Transpose : bool { kNo, kYes };

/// Heads of the interleaved QKV tensor [N, (heads + 2 kv_heads) * head_size]: all query heads, then
/// all key heads, then all value heads. heads is a multiple of kv_heads.
struct AttentionShape {
  int heads = 0;
  int kv_heads = 0;
  int head_size = 0;
  std::int64_t qkv_width() const { return std::int64_t{heads + 2 * kv_heads} * head_size; }
  std::int64_t output_width() const { return std::int64_t{heads} * head_size; }
};

/// Cumulative document lengths: document d holds tokens [starts[d], starts[d + 1]); a token attends
/// to itself and to earlier tokens of its document only. starts[0] = 0, starts[count] = N.
struct Documents {
  Tensor starts;  // int32 [count + 1 or more], backend memory
  std::int64_t count = 0;
  std::int64_t longest = 0;  // tokens; an upper bound will do
};

/// How the weights that the optimizer updates are held.
enum class MasterKind : std::uint8_t {
  kNone,       // the weight is its own master; a BF16 weight is rounded stochastically
  kFp32,       // an FP32 copy; the BF16 weight is it rounded half away from zero
  kRemainder,  // BF16 weight + int16 remainder = the FP32 master, exactly
};

struct AdamwTensors {
  Tensor weight;         // model type, [rows, columns]
  Tensor master;         // FP32 (kFp32), int16 (kRemainder) or not given (kNone)
  QuantTensor gradient;  // the main gradient: any format
  QuantTensor first_moment;
  QuantTensor second_moment;
};

/// One AdamW step with decoupled decay (Loshchilov & Hutter, 2019); scalars of the whole step.
struct AdamwStep {
  MasterKind master = MasterKind::kNone;
  double learning_rate = 0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0;    // 0 for parameters without decay
  double gradient_scale = 1;  // clip factor / valid tokens of the global step
  std::int64_t step = 1;      // 1 at the first update: bias correction
};

enum class BackendKind : std::uint8_t { kCpu, kCuda };

/// What each rank holds of the same rows, in rank order.
using TensorPieces = std::span<const QuantTensor>;

/// Bytes of a device's memory.
struct DeviceMemory {
  std::string name;       // "NVIDIA H200"; empty on a machine without the device, where a plan is made
  std::size_t total = 0;  // 0 where there is no device
  std::size_t free = 0;   // now, after every process's allocations
  std::size_t overhead = 0;  // measured: what kernels and libraries take during a run beside the arenas
  std::size_t granule = 0;   // an allocation takes a multiple of it, one at least; 0: what it asks for
  /// Measured: what a process takes once, before its first allocation, by using the device at all. Where
  /// there is a device, `free` is without it already.
  std::size_t context = 0;

  /// What an allocation of so many bytes takes.
  std::size_t taken_for(std::size_t bytes) const {
    if (granule == 0) return bytes;
    return bytes <= granule ? granule : (bytes + granule - 1) / granule * granule;
  }
};

/// A library that a backend opens when it runs.
struct BackendLibrary {
  std::string name;     // "cuDNN"
  std::string version;  // "9.19", or in words why it cannot be used
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;    // "cpu", "cuda"
  virtual std::string description() const = 0;  // one line for `agoq info`
  /// What else a run here depends on, for `agoq info`; needs no device.
  virtual std::vector<BackendLibrary> found_libraries() { return {}; }
  virtual Allocator& allocator() = 0;
  /// Of the device whose memory the allocator hands out; nothing where that is the host's.
  virtual std::optional<DeviceMemory> device_memory() = 0;
  /// Seconds that the operations take which `work` queues on the context's stream, from when the device
  /// begins the first to when it ends the last; waits for them. 0 on a measuring context. `wait` is
  /// called before that, for work that is to be waited for in its own way (Communicator::wait has a
  /// deadline).
  virtual double time(const Context&, const std::function<void()>& work,
                      const std::function<void()>& wait = {}) = 0;
  /// With true, an operation computes the same bits in every run. For backends where that costs speed or
  /// memory; others always do. To be set before a plan is made: it changes workspaces.
  virtual void set_deterministic(bool) {}
  /// Backward attention may be computed in up to so many calls, each of a group of key/value heads with
  /// its query heads, one after the other in the workspace of one: for backends whose workspace grows
  /// with the heads. To be set before a plan is made, too; plan_run does.
  virtual void set_attention_groups(int) {}
  /// Throws Error (kInput) saying what is missing when a run could not be computed here: a device, its
  /// driver, libraries. To be called in the mode of the run, before the run touches anything.
  virtual void expect_ready() {}

  /// The device that this process computes on: the one of this index among those it sees, or the only
  /// one. To be called before anything is allocated. Throws Error (kInput) when there are fewer.
  virtual void use_device(int) {}

  // --- streams beside the context's ---
  /// A queue of its own for index 0, 1, ...: made at its first call, and the same at every later one.
  virtual Stream side_stream(int) { return {}; }
  /// What is queued on `later` from now on begins when what `earlier` holds now is done.
  virtual void order(Stream /*earlier*/, Stream /*later*/) {}
  /// order() in two parts: what `earlier` holds at mark(earlier, n) is done before what is queued on
  /// `later` after await_mark(n, later) begins. Numbers n count from 0; a later mark replaces one.
  virtual void mark(Stream /*earlier*/, int) {}
  virtual void await_mark(int, Stream /*later*/) {}

  // --- data movement ---
  virtual void zero(const Context&, std::byte* memory, std::size_t bytes) = 0;
  /// Converts between floating-point types (nearest even); other types must be equal.
  virtual void copy(const Context&, const Tensor& source, const Tensor& destination) = 0;
  /// From and to host memory, bytes as they are; read waits for the stream.
  virtual void upload(const Context&, const void* source, std::byte* destination, std::size_t bytes) = 0;
  virtual void read(const Context&, const std::byte* source, void* destination, std::size_t bytes) = 0;
  /// sum = a + b, element-wise; sum may be a or b.
  virtual void add(const Context&, const Tensor& a, const Tensor& b, const Tensor& sum) = 0;
  /// Row i of `destination` = row rows[i] of `source`, the bytes of all planes as they are. Both have
  /// one format, row length and segments.  rows int32 [destination.rows()], each in [0, source.rows()).
  virtual void gather_rows(const Context&, const QuantTensor& source, const Tensor& rows,
                           const QuantTensor& destination) = 0;
  /// The way back: row rows[i] of `destination` = row i of `source`; other rows are not touched.  rows
  /// int32 [source.rows()], each in [0, destination.rows()) and no two the same.
  virtual void scatter_rows(const Context&, const QuantTensor& source, const Tensor& rows,
                            const QuantTensor& destination) = 0;

  // --- matrices ---
  /// c = op(a) op(b) (+ c if accumulate), row-major matrices [rows(), width()]; op transposes on
  /// request.
  virtual void matmul(const Context&, const Tensor& a, Transpose transpose_a, const Tensor& b,
                      Transpose transpose_b, const Tensor& c, bool accumulate = false) = 0;

  // --- embedding ---
  /// out[n] = table[tokens[n]].  tokens int32 [N], table [V, H], out [N, H].
  virtual void embedding_forward(const Context&, const Tensor& tokens, const Tensor& table,
                                 const Tensor& out) = 0;
  /// Adds, for each token id present, the sum over its positions (in order) of dout to that row of
  /// the main gradient dtable [V, H]; other rows are not touched. counters: see quantize. tokens are
  /// what upload brought, not what another operation wrote: they may be read while that still runs.
  virtual void embedding_backward(const Context&, const Tensor& tokens, const Tensor& dout,
                                  const QuantTensor& dtable, const RandomKey& key,
                                  const Tensor& counters) = 0;

  // --- normalisation ---
  /// y = norm(x).  x, y [N, H]; weight [H], not given for kLayerNorm; rstd optional, [N] compute type.
  virtual void norm_forward(const Context&, NormKind, const Tensor& x, const Tensor& weight,
                            double epsilon, const Tensor& y, const Tensor& rstd) = 0;
  /// dx += J^T dy; dweight += (fp32 or fp64 [H], not given for kLayerNorm). rstd optional: recomputed
  /// from x when not given.
  virtual void norm_backward(const Context&, NormKind, const Tensor& dy, const Tensor& x,
                             const Tensor& weight, double epsilon, const Tensor& rstd, const Tensor& dx,
                             const Tensor& dweight) = 0;

  // --- rotary position embedding ---
  /// Rotates the query and key heads of qkv in place: pairs (i, i + head_size / 2) by the angle whose
  /// cosine and sine are table[position][i] = (cos, sin); inverse rotates back (the backward pass).
  /// table: compute type [positions, head_size / 2, 2]; positions int32 [N].
  virtual void rope(const Context&, const AttentionShape&, const Tensor& qkv, const Tensor& positions,
                    const Tensor& table, bool inverse) = 0;

  // --- attention ---
  /// Causal softmax(q k^T / sqrt(head_size)) v within documents.  qkv [N, qkv_width], out
  /// [N, output_width], log_sum_exp compute type [N, heads].
  virtual void attention_forward(const Context&, const AttentionShape&, const Tensor& qkv,
                                 const Documents&, const Tensor& out, const Tensor& log_sum_exp) = 0;
  virtual void attention_backward(const Context&, const AttentionShape&, const Tensor& dout,
                                  const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp,
                                  const Documents&, const Tensor& dqkv) = 0;

  // --- gated activation ---
  /// hidden = silu(gate) * up.  gate_up [N, 2I]: gate then up; hidden [N, I].
  virtual void swiglu_forward(const Context&, const Tensor& gate_up, const Tensor& hidden) = 0;
  /// dgate_up from dhidden; recomputes hidden too if given.
  virtual void swiglu_backward(const Context&, const Tensor& dhidden, const Tensor& gate_up,
                               const Tensor& dgate_up, const Tensor& hidden) = 0;

  // --- loss ---
  /// token_loss[c] = weight[c] * (log sum exp(logits[c]) - logits[c][target[c]]); dlogits (optional) =
  /// the gradient of the sum of token_loss.  logits compute type [C, V]; dlogits [C, V] of any floating
  /// type, and may be logits itself; targets int32 [C]; weights fp32 [C]; token_loss compute type [C].
  /// Rows of weight 0 have loss 0 and gradient 0. A target outside the vocabulary is refused where the
  /// host can read it (CPU); elsewhere the row's loss is NaN, for the check of the step, and its
  /// gradient 0.
  virtual void cross_entropy(const Context&, const Tensor& logits, const Tensor& targets,
                             const Tensor& weights, const Tensor& token_loss, const Tensor& dlogits) = 0;

  // --- reductions ---
  /// total[0] = sum of x in double precision, in element order.  total fp64 [1].
  virtual void sum(const Context&, const Tensor& x, const Tensor& total) = 0;
  /// totals[i] = sum of squares of what xs[i] decodes to, in double precision; it depends on xs[i]
  /// alone. totals fp64 [as many as xs].
  virtual void sums_of_squares(const Context&, std::span<const QuantTensor> xs,
                               const Tensor& totals) = 0;
  /// Of one.
  void sum_of_squares(const Context& context, const QuantTensor& x, const Tensor& total) {
    sums_of_squares(context, {&x, 1}, total);
  }

  // --- formats ---
  /// destination = quantised source.  source [rows(), width()] matches destination's grid. key is used
  /// by stochastic rounding only (element index = (first_row + row) * row_length + column). counters:
  /// optional, int64 [kQuantCounters], added to.
  virtual void quantize(const Context&, const Tensor& source, const QuantTensor& destination,
                        const RandomKey& key, const Tensor& counters) = 0;
  virtual void dequantize(const Context&, const QuantTensor& source, const Tensor& destination) = 0;
  /// main = quantised(dequantised(main) + addend), with fresh block scales.
  virtual void accumulate(const Context&, const Tensor& addend, const QuantTensor& main,
                          const RandomKey& key, const Tensor& counters) = 0;

  // --- pieces: what each rank holds of the same rows, in rank order ---
  // Their sum is made in FP32, in the order of the pieces, element by element: (p0 + p1) + p2 ...; in
  // FP64 where they are stored in it. One piece is its own sum.

  /// sum = quantised(sum of the dequantised pieces), with fresh block scales; sum may be one of the
  /// pieces. All have one grid. counters: see quantize. row_numbers: optional, int32 [rows]: the row of
  /// the whole tensor at which each row stands, in place of first_row + row, for stochastic rounding.
  virtual void add_pieces(const Context&, std::span<const QuantTensor> pieces, const QuantTensor& sum,
                          const RandomKey& key, const Tensor& counters, const Tensor& row_numbers = {});
  /// The naive sum that add_pieces is better than, as a control: pieces, of e4m3 under fp32 scales, are
  /// rounded to e4m3 under one scale for all, and so is every partial sum, which saturates at 448 times
  /// it. sum: of the same format; all of its scales become `scale`.
  virtual void add_pieces_naively(const Context&, std::span<const QuantTensor> pieces,
                                  const QuantTensor& sum, float scale) = 0;
  /// totals[i] = sum of squares of the sum of the pieces tensors[i], in double precision. What it
  /// computes depends on their values only: the same bits whether they come as pieces or as one exact
  /// tensor. totals fp64 [as many as tensors].
  virtual void pieces_sums_of_squares(const Context&, std::span<const TensorPieces> tensors,
                                      const Tensor& totals) = 0;
  /// Of one.
  void pieces_sum_of_squares(const Context& context, const TensorPieces& pieces, const Tensor& total) {
    pieces_sums_of_squares(context, {&pieces, 1}, total);
  }

  // --- optimizer ---
  /// One AdamW update in a single pass; no FP32 gradient or moment of a whole tensor exists. key names
  /// seed, step and tensor; purposes are set inside. A BF16 weight with MasterKind::kNone is rounded
  /// stochastically; FP32 and FP64 weights are their own master (kNone).
  virtual void adamw_update(const Context&, const AdamwTensors&, const AdamwStep&,
                            const RandomKey& key) = 0;
  /// The same with the sum of `gradients` for tensors.gradient, which is not given. No more than some
  /// rows of it at a time exist in FP32.
  virtual void adamw_update_pieces(const Context&, std::span<const QuantTensor> gradients,
                                   const AdamwTensors&, const AdamwStep&, const RandomKey& key);

  // --- initial weights ---
  /// x[i] = deviation * random_normal(key, i), computed in double precision.  x fp32.
  virtual void fill_normal(const Context&, const RandomKey& key, double deviation, const Tensor& x) = 0;
  /// A weight (and its master, as AdamwTensors has it) that starts from the fp32 values `initial`. BF16
  /// weights are rounded half away from zero under every MasterKind, so that all start from the same.
  virtual void initialise_weight(const Context&, const Tensor& initial, MasterKind, const Tensor& weight,
                                 const Tensor& master) = 0;

  // --- fused operations; each default body is the specification ---
  /// x += delta (optional); saved = quantised x (optional); y = norm(x); rstd optional.
  virtual void residual_norm_forward(const Context&, NormKind, const Tensor& x, const Tensor& delta,
                                     const Tensor& weight, double epsilon, const Tensor& y,
                                     const Tensor& rstd, const QuantTensor& saved, const RandomKey& key,
                                     const Tensor& counters);
  /// y = norm(x) from the saved x.
  virtual void norm_forward_saved(const Context&, NormKind, const QuantTensor& x, const Tensor& weight,
                                  double epsilon, const Tensor& y);
  virtual void norm_backward_saved(const Context&, NormKind, const Tensor& dy, const QuantTensor& x,
                                   const Tensor& weight, double epsilon, const Tensor& rstd,
                                   const Tensor& dx, const Tensor& dweight);
  /// hidden = silu(gate) * up; saved = quantised gate_up (optional).
  virtual void swiglu_forward_save(const Context&, const Tensor& gate_up, const Tensor& hidden,
                                   const QuantTensor& saved, const RandomKey& key,
                                   const Tensor& counters);
  virtual void swiglu_backward_saved(const Context&, const Tensor& dhidden, const QuantTensor& gate_up,
                                     const Tensor& dgate_up, const Tensor& hidden);
  /// main += dy^T x: the weight gradient of y = x w^T, dy [N, rows], x [N, columns].
  virtual void accumulate_weight_gradient(const Context&, const Tensor& dy, const Tensor& x,
                                          const QuantTensor& main, const RandomKey& key,
                                          const Tensor& counters);

 protected:
  /// The exact tensor behind `saved` if its type is `type`, else a dequantised copy in the workspace.
  Tensor materialise(const Context&, const QuantTensor& saved, ElementType type);
};

/// The rows of a table of counters, int64 [rows, kQuantCounters], read back at once: a read waits for
/// the stream.
std::vector<QuantCounts> read_counts(const Context&, const Tensor& counters);

/// Zeroes every plane of `tensor`, which makes it a zero tensor in every format: a block whose scale is
/// zero decodes to zeros.
void zero_planes(const Context&, const QuantTensor& tensor);

/// The CPU backend, in the build for the best instruction set this machine has.
Backend& cpu_backend();

/// The CUDA backend. Opening it needs CUDA's libraries and no GPU; the GPU is looked for when memory is
/// allocated. Throws Error (kInput) where the build has none or a library is missing.
Backend& cuda_backend();

Backend& backend_of(BackendKind kind);

}  // namespace agoq
