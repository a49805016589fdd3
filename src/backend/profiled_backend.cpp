#include "backend/profiled_backend.h"

#include <algorithm>

namespace agoq {
namespace {

/// Bytes of an operand; 0 where it is not given.
double of(const Tensor& tensor) { return tensor ? static_cast<double>(tensor.bytes()) : 0; }
double of(const QuantTensor& tensor) {
  return tensor ? static_cast<double>(payload_bytes(tensor.format, tensor.grid)) : 0;
}

double of(std::span<const QuantTensor> pieces) {
  double bytes = 0;
  for (const QuantTensor& piece : pieces) bytes += of(piece);
  return bytes;
}

/// Query and key pairs under the causal mask, the documents taken as equally long.
double pairs(const Documents& documents, const Tensor& out) {
  const auto tokens = static_cast<double>(out.rows());
  const double longest = tokens / static_cast<double>(std::max<std::int64_t>(documents.count, 1));
  return tokens * (longest + 1) / 2;
}

}  // namespace

template <typename Work>
void ProfiledBackend::run(const Context& context, const char* operation, double bytes, double flops,
                          Work work) {
  const Context own{backend_, context.stream, context.workspace, context.random};
  if (context.workspace.is_measuring()) return work(own);
  const double seconds = backend_.time(own, [&] { work(own); });
  OperationProfile& profile = profile_[operation];
  profile.operation = operation;
  ++profile.calls;
  profile.seconds += seconds;
  profile.bytes += bytes;
  profile.flops += flops;
}

std::vector<OperationProfile> ProfiledBackend::profile() const {
  std::vector<OperationProfile> sorted;
  sorted.reserve(profile_.size());
  for (const auto& [name, profile] : profile_) sorted.push_back(profile);
  std::stable_sort(
      sorted.begin(), sorted.end(),
      [](const OperationProfile& a, const OperationProfile& b) { return a.seconds > b.seconds; });
  return sorted;
}

double ProfiledBackend::time(const Context& context, const std::function<void()>& work,
                             const std::function<void()>& wait) {
  return backend_.time({backend_, context.stream, context.workspace, context.random}, work, wait);
}

void ProfiledBackend::zero(const Context& context, std::byte* memory, std::size_t bytes) {
  run(context, "zero", static_cast<double>(bytes), 0,
      [&](const Context& own) { backend_.zero(own, memory, bytes); });
}

void ProfiledBackend::copy(const Context& context, const Tensor& source, const Tensor& destination) {
  run(context, "copy", of(source) + of(destination), 0,
      [&](const Context& own) { backend_.copy(own, source, destination); });
}

void ProfiledBackend::upload(const Context& context, const void* source, std::byte* destination,
                             std::size_t bytes) {
  run(context, "upload", static_cast<double>(bytes), 0,
      [&](const Context& own) { backend_.upload(own, source, destination, bytes); });
}

void ProfiledBackend::read(const Context& context, const std::byte* source, void* destination,
                           std::size_t bytes) {
  run(context, "read", static_cast<double>(bytes), 0,
      [&](const Context& own) { backend_.read(own, source, destination, bytes); });
}

void ProfiledBackend::add(const Context& context, const Tensor& a, const Tensor& b, const Tensor& sum) {
  run(context, "add", of(a) + of(b) + of(sum), 0,
      [&](const Context& own) { backend_.add(own, a, b, sum); });
}

void ProfiledBackend::gather_rows(const Context& context, const QuantTensor& source, const Tensor& rows,
                                  const QuantTensor& destination) {
  run(context, "gather_rows", of(rows) + 2 * of(destination), 0,
      [&](const Context& own) { backend_.gather_rows(own, source, rows, destination); });
}

void ProfiledBackend::scatter_rows(const Context& context, const QuantTensor& source, const Tensor& rows,
                                   const QuantTensor& destination) {
  run(context, "scatter_rows", of(rows) + 2 * of(source), 0,
      [&](const Context& own) { backend_.scatter_rows(own, source, rows, destination); });
}

void ProfiledBackend::matmul(const Context& context, const Tensor& a, Transpose transpose_a,
                             const Tensor& b, Transpose transpose_b, const Tensor& c, bool accumulate) {
  const std::int64_t depth = transpose_a == Transpose::kYes ? a.rows() : a.width();
  run(context, "matmul", of(a) + of(b) + of(c) * (accumulate ? 2 : 1),
      2.0 * static_cast<double>(c.count()) * static_cast<double>(depth),
      [&](const Context& own) { backend_.matmul(own, a, transpose_a, b, transpose_b, c, accumulate); });
}

void ProfiledBackend::embedding_forward(const Context& context, const Tensor& tokens,
                                        const Tensor& table, const Tensor& out) {
  run(context, "embedding_forward", of(tokens) + 2 * of(out), 0,
      [&](const Context& own) { backend_.embedding_forward(own, tokens, table, out); });
}

void ProfiledBackend::embedding_backward(const Context& context, const Tensor& tokens,
                                         const Tensor& dout, const QuantTensor& dtable,
                                         const RandomKey& key, const Tensor& counters) {
  run(context, "embedding_backward", of(tokens) + of(dout), 0, [&](const Context& own) {
    backend_.embedding_backward(own, tokens, dout, dtable, key, counters);
  });
}

void ProfiledBackend::norm_forward(const Context& context, NormKind kind, const Tensor& x,
                                   const Tensor& weight, double epsilon, const Tensor& y,
                                   const Tensor& rstd) {
  run(context, "norm_forward", of(x) + of(y), 0,
      [&](const Context& own) { backend_.norm_forward(own, kind, x, weight, epsilon, y, rstd); });
}

void ProfiledBackend::norm_backward(const Context& context, NormKind kind, const Tensor& dy,
                                    const Tensor& x, const Tensor& weight, double epsilon,
                                    const Tensor& rstd, const Tensor& dx, const Tensor& dweight) {
  run(context, "norm_backward", of(dy) + of(x) + 2 * of(dx), 0, [&](const Context& own) {
    backend_.norm_backward(own, kind, dy, x, weight, epsilon, rstd, dx, dweight);
  });
}

void ProfiledBackend::rope(const Context& context, const AttentionShape& shape, const Tensor& qkv,
                           const Tensor& positions, const Tensor& table, bool inverse) {
  run(context, "rope", 2 * of(qkv) * (shape.heads + shape.kv_heads) / (shape.heads + 2 * shape.kv_heads),
      0, [&](const Context& own) { backend_.rope(own, shape, qkv, positions, table, inverse); });
}

void ProfiledBackend::attention_forward(const Context& context, const AttentionShape& shape,
                                        const Tensor& qkv, const Documents& documents, const Tensor& out,
                                        const Tensor& log_sum_exp) {
  run(context, "attention_forward", of(qkv) + of(out) + of(log_sum_exp),
      2.0 * pairs(documents, out) * static_cast<double>(shape.output_width()) * 2,
      [&](const Context& own) {
        backend_.attention_forward(own, shape, qkv, documents, out, log_sum_exp);
      });
}

void ProfiledBackend::attention_backward(const Context& context, const AttentionShape& shape,
                                         const Tensor& dout, const Tensor& qkv, const Tensor& out,
                                         const Tensor& log_sum_exp, const Documents& documents,
                                         const Tensor& dqkv) {
  run(context, "attention_backward", of(dout) + 2 * of(qkv) + of(out) + of(log_sum_exp),
      2.0 * pairs(documents, out) * static_cast<double>(shape.output_width()) * 5,
      [&](const Context& own) {
        backend_.attention_backward(own, shape, dout, qkv, out, log_sum_exp, documents, dqkv);
      });
}

void ProfiledBackend::swiglu_forward(const Context& context, const Tensor& gate_up,
                                     const Tensor& hidden) {
  run(context, "swiglu_forward", of(gate_up) + of(hidden), 0,
      [&](const Context& own) { backend_.swiglu_forward(own, gate_up, hidden); });
}

void ProfiledBackend::swiglu_backward(const Context& context, const Tensor& dhidden,
                                      const Tensor& gate_up, const Tensor& dgate_up,
                                      const Tensor& hidden) {
  run(context, "swiglu_backward", of(dhidden) + of(gate_up) + of(dgate_up) + of(hidden), 0,
      [&](const Context& own) { backend_.swiglu_backward(own, dhidden, gate_up, dgate_up, hidden); });
}

void ProfiledBackend::cross_entropy(const Context& context, const Tensor& logits, const Tensor& targets,
                                    const Tensor& weights, const Tensor& token_loss,
                                    const Tensor& dlogits) {
  run(context, "cross_entropy", of(logits) + of(dlogits), 0, [&](const Context& own) {
    backend_.cross_entropy(own, logits, targets, weights, token_loss, dlogits);
  });
}

void ProfiledBackend::sum(const Context& context, const Tensor& x, const Tensor& total) {
  run(context, "sum", of(x), 0, [&](const Context& own) { backend_.sum(own, x, total); });
}

void ProfiledBackend::sums_of_squares(const Context& context, std::span<const QuantTensor> xs,
                                      const Tensor& totals) {
  run(context, "sums_of_squares", of(xs), 0,
      [&](const Context& own) { backend_.sums_of_squares(own, xs, totals); });
}

void ProfiledBackend::quantize(const Context& context, const Tensor& source,
                               const QuantTensor& destination, const RandomKey& key,
                               const Tensor& counters) {
  run(context, "quantize", of(source) + of(destination), 0,
      [&](const Context& own) { backend_.quantize(own, source, destination, key, counters); });
}

void ProfiledBackend::dequantize(const Context& context, const QuantTensor& source,
                                 const Tensor& destination) {
  run(context, "dequantize", of(source) + of(destination), 0,
      [&](const Context& own) { backend_.dequantize(own, source, destination); });
}

void ProfiledBackend::accumulate(const Context& context, const Tensor& addend, const QuantTensor& main,
                                 const RandomKey& key, const Tensor& counters) {
  run(context, "accumulate", of(addend) + 2 * of(main), 0,
      [&](const Context& own) { backend_.accumulate(own, addend, main, key, counters); });
}

void ProfiledBackend::add_pieces(const Context& context, std::span<const QuantTensor> pieces,
                                 const QuantTensor& sum, const RandomKey& key, const Tensor& counters,
                                 const Tensor& row_numbers) {
  run(context, "add_pieces", of(pieces) + of(sum), 0,
      [&](const Context& own) { backend_.add_pieces(own, pieces, sum, key, counters, row_numbers); });
}

void ProfiledBackend::add_pieces_naively(const Context& context, std::span<const QuantTensor> pieces,
                                         const QuantTensor& sum, float scale) {
  run(context, "add_pieces_naively", of(pieces) + of(sum), 0,
      [&](const Context& own) { backend_.add_pieces_naively(own, pieces, sum, scale); });
}

void ProfiledBackend::pieces_sums_of_squares(const Context& context,
                                             std::span<const TensorPieces> tensors,
                                             const Tensor& totals) {
  double bytes = 0;
  for (const TensorPieces& pieces : tensors) bytes += of(pieces);
  run(context, "pieces_sums_of_squares", bytes, 0,
      [&](const Context& own) { backend_.pieces_sums_of_squares(own, tensors, totals); });
}

void ProfiledBackend::adamw_update_pieces(const Context& context, std::span<const QuantTensor> gradients,
                                          const AdamwTensors& tensors, const AdamwStep& step,
                                          const RandomKey& key) {
  run(context, "adamw_update",
      2 * (of(tensors.weight) + of(tensors.master) + of(tensors.first_moment) +
           of(tensors.second_moment)) +
          of(gradients),
      0, [&](const Context& own) { backend_.adamw_update_pieces(own, gradients, tensors, step, key); });
}

void ProfiledBackend::adamw_update(const Context& context, const AdamwTensors& tensors,
                                   const AdamwStep& step, const RandomKey& key) {
  run(context, "adamw_update",
      2 * (of(tensors.weight) + of(tensors.master) + of(tensors.first_moment) +
           of(tensors.second_moment)) +
          of(tensors.gradient),
      0, [&](const Context& own) { backend_.adamw_update(own, tensors, step, key); });
}

void ProfiledBackend::fill_normal(const Context& context, const RandomKey& key, double deviation,
                                  const Tensor& x) {
  run(context, "fill_normal", of(x), 0,
      [&](const Context& own) { backend_.fill_normal(own, key, deviation, x); });
}

void ProfiledBackend::initialise_weight(const Context& context, const Tensor& initial, MasterKind kind,
                                        const Tensor& weight, const Tensor& master) {
  run(context, "initialise_weight", of(initial) + of(weight) + of(master), 0,
      [&](const Context& own) { backend_.initialise_weight(own, initial, kind, weight, master); });
}

void ProfiledBackend::residual_norm_forward(const Context& context, NormKind kind, const Tensor& x,
                                            const Tensor& delta, const Tensor& weight, double epsilon,
                                            const Tensor& y, const Tensor& rstd,
                                            const QuantTensor& saved, const RandomKey& key,
                                            const Tensor& counters) {
  run(context, "residual_norm_forward", of(x) * (delta ? 2 : 1) + of(delta) + of(y) + of(saved), 0,
      [&](const Context& own) {
        backend_.residual_norm_forward(own, kind, x, delta, weight, epsilon, y, rstd, saved, key,
                                       counters);
      });
}

void ProfiledBackend::norm_forward_saved(const Context& context, NormKind kind, const QuantTensor& x,
                                         const Tensor& weight, double epsilon, const Tensor& y) {
  run(context, "norm_forward_saved", of(x) + of(y), 0,
      [&](const Context& own) { backend_.norm_forward_saved(own, kind, x, weight, epsilon, y); });
}

void ProfiledBackend::norm_backward_saved(const Context& context, NormKind kind, const Tensor& dy,
                                          const QuantTensor& x, const Tensor& weight, double epsilon,
                                          const Tensor& rstd, const Tensor& dx, const Tensor& dweight) {
  run(context, "norm_backward_saved", of(dy) + of(x) + 2 * of(dx), 0, [&](const Context& own) {
    backend_.norm_backward_saved(own, kind, dy, x, weight, epsilon, rstd, dx, dweight);
  });
}

void ProfiledBackend::swiglu_forward_save(const Context& context, const Tensor& gate_up,
                                          const Tensor& hidden, const QuantTensor& saved,
                                          const RandomKey& key, const Tensor& counters) {
  run(context, "swiglu_forward_save", of(gate_up) + of(hidden) + of(saved), 0, [&](const Context& own) {
    backend_.swiglu_forward_save(own, gate_up, hidden, saved, key, counters);
  });
}

void ProfiledBackend::swiglu_backward_saved(const Context& context, const Tensor& dhidden,
                                            const QuantTensor& gate_up, const Tensor& dgate_up,
                                            const Tensor& hidden) {
  run(context, "swiglu_backward_saved", of(dhidden) + of(gate_up) + of(dgate_up) + of(hidden), 0,
      [&](const Context& own) {
        backend_.swiglu_backward_saved(own, dhidden, gate_up, dgate_up, hidden);
      });
}

void ProfiledBackend::accumulate_weight_gradient(const Context& context, const Tensor& dy,
                                                 const Tensor& x, const QuantTensor& main,
                                                 const RandomKey& key, const Tensor& counters) {
  run(context, "accumulate_weight_gradient", 2 * of(main),
      2.0 * static_cast<double>(main.grid.count()) * static_cast<double>(x.rows()),
      [&](const Context& own) { backend_.accumulate_weight_gradient(own, dy, x, main, key, counters); });
}

}  // namespace agoq
