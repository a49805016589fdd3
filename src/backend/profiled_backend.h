// ProfiledBackend: another backend, each of whose operations is timed by itself and counted.
//
// Every operation is waited for, so a profiled step is slower than the sum of what it reports: the
// difference to an ordinary step is what overlaps or what the host keeps waiting.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace agoq {

/// What the calls of one operation took together. Bytes: each operand's once per call, as it is stored,
/// of accumulate_weight_gradient the main gradient's only (its operands are a matrix product's).
/// Floating-point operations: of matrix products and attention.
struct OperationProfile {
  std::string operation;
  std::int64_t calls = 0;
  double seconds = 0;
  double bytes = 0;
  double flops = 0;
};

class ProfiledBackend : public Backend {
 public:
  explicit ProfiledBackend(Backend& backend) : backend_(backend) {}

  /// Since the last reset, the longest first.
  std::vector<OperationProfile> profile() const;
  void reset() { profile_.clear(); }

  std::string_view name() const override { return backend_.name(); }
  std::string description() const override { return backend_.description(); }
  std::vector<BackendLibrary> found_libraries() override { return backend_.found_libraries(); }
  Allocator& allocator() override { return backend_.allocator(); }
  std::optional<DeviceMemory> device_memory() override { return backend_.device_memory(); }
  double time(const Context&, const std::function<void()>& work,
              const std::function<void()>& wait) override;
  void set_deterministic(bool deterministic) override { backend_.set_deterministic(deterministic); }
  void set_attention_groups(int groups) override { backend_.set_attention_groups(groups); }
  void expect_ready() override { backend_.expect_ready(); }
  void use_device(int index) override { backend_.use_device(index); }
  Stream side_stream(int index) override { return backend_.side_stream(index); }
  void order(Stream earlier, Stream later) override { backend_.order(earlier, later); }
  void mark(Stream earlier, int number) override { backend_.mark(earlier, number); }
  void await_mark(int number, Stream later) override { backend_.await_mark(number, later); }

  void zero(const Context&, std::byte* memory, std::size_t bytes) override;
  void copy(const Context&, const Tensor& source, const Tensor& destination) override;
  void upload(const Context&, const void* source, std::byte* destination, std::size_t bytes) override;
  void read(const Context&, const std::byte* source, void* destination, std::size_t bytes) override;
  void add(const Context&, const Tensor& a, const Tensor& b, const Tensor& sum) override;
  void gather_rows(const Context&, const QuantTensor& source, const Tensor& rows,
                   const QuantTensor& destination) override;
  void scatter_rows(const Context&, const QuantTensor& source, const Tensor& rows,
                    const QuantTensor& destination) override;
  void matmul(const Context&, const Tensor& a, Transpose transpose_a, const Tensor& b,
              Transpose transpose_b, const Tensor& c, bool accumulate) override;
  void embedding_forward(const Context&, const Tensor& tokens, const Tensor& table,
                         const Tensor& out) override;
  void embedding_backward(const Context&, const Tensor& tokens, const Tensor& dout,
                          const QuantTensor& dtable, const RandomKey& key,
                          const Tensor& counters) override;
  void norm_forward(const Context&, NormKind, const Tensor& x, const Tensor& weight, double epsilon,
                    const Tensor& y, const Tensor& rstd) override;
  void norm_backward(const Context&, NormKind, const Tensor& dy, const Tensor& x, const Tensor& weight,
                     double epsilon, const Tensor& rstd, const Tensor& dx,
                     const Tensor& dweight) override;
  void rope(const Context&, const AttentionShape&, const Tensor& qkv, const Tensor& positions,
            const Tensor& table, bool inverse) override;
  void attention_forward(const Context&, const AttentionShape&, const Tensor& qkv, const Documents&,
                         const Tensor& out, const Tensor& log_sum_exp) override;
  void attention_backward(const Context&, const AttentionShape&, const Tensor& dout, const Tensor& qkv,
                          const Tensor& out, const Tensor& log_sum_exp, const Documents&,
                          const Tensor& dqkv) override;
  void swiglu_forward(const Context&, const Tensor& gate_up, const Tensor& hidden) override;
  void swiglu_backward(const Context&, const Tensor& dhidden, const Tensor& gate_up,
                       const Tensor& dgate_up, const Tensor& hidden) override;
  void cross_entropy(const Context&, const Tensor& logits, const Tensor& targets, const Tensor& weights,
                     const Tensor& token_loss, const Tensor& dlogits) override;
  void sum(const Context&, const Tensor& x, const Tensor& total) override;
  void sums_of_squares(const Context&, std::span<const QuantTensor> xs, const Tensor& totals) override;
  void quantize(const Context&, const Tensor& source, const QuantTensor& destination,
                const RandomKey& key, const Tensor& counters) override;
  void dequantize(const Context&, const QuantTensor& source, const Tensor& destination) override;
  void accumulate(const Context&, const Tensor& addend, const QuantTensor& main, const RandomKey& key,
                  const Tensor& counters) override;
  void add_pieces(const Context&, std::span<const QuantTensor> pieces, const QuantTensor& sum,
                  const RandomKey& key, const Tensor& counters, const Tensor& row_numbers) override;
  void add_pieces_naively(const Context&, std::span<const QuantTensor> pieces, const QuantTensor& sum,
                          float scale) override;
  void pieces_sums_of_squares(const Context&, std::span<const TensorPieces> tensors,
                              const Tensor& totals) override;
  void adamw_update(const Context&, const AdamwTensors&, const AdamwStep&,
                    const RandomKey& key) override;
  void adamw_update_pieces(const Context&, std::span<const QuantTensor> gradients, const AdamwTensors&,
                           const AdamwStep&, const RandomKey& key) override;
  void fill_normal(const Context&, const RandomKey& key, double deviation, const Tensor& x) override;
  void initialise_weight(const Context&, const Tensor& initial, MasterKind, const Tensor& weight,
                         const Tensor& master) override;
  void residual_norm_forward(const Context&, NormKind, const Tensor& x, const Tensor& delta,
                             const Tensor& weight, double epsilon, const Tensor& y, const Tensor& rstd,
                             const QuantTensor& saved, const RandomKey& key,
                             const Tensor& counters) override;
  void norm_forward_saved(const Context&, NormKind, const QuantTensor& x, const Tensor& weight,
                          double epsilon, const Tensor& y) override;
  void norm_backward_saved(const Context&, NormKind, const Tensor& dy, const QuantTensor& x,
                           const Tensor& weight, double epsilon, const Tensor& rstd, const Tensor& dx,
                           const Tensor& dweight) override;
  void swiglu_forward_save(const Context&, const Tensor& gate_up, const Tensor& hidden,
                           const QuantTensor& saved, const RandomKey& key,
                           const Tensor& counters) override;
  void swiglu_backward_saved(const Context&, const Tensor& dhidden, const QuantTensor& gate_up,
                             const Tensor& dgate_up, const Tensor& hidden) override;
  void accumulate_weight_gradient(const Context&, const Tensor& dy, const Tensor& x,
                                  const QuantTensor& main, const RandomKey& key,
                                  const Tensor& counters) override;

 private:
  /// Runs and times `work`, unless the context only measures memory.
  template <typename Work>
  void run(const Context& context, const char* operation, double bytes, double flops, Work work);

  Backend& backend_;
  std::map<std::string, OperationProfile> profile_;
};

}  // namespace agoq
