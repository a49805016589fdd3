#include "train/finite_trace.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace agoq {
namespace {

bool is_same(const Tensor& a, const Tensor& b) {
  return a.data == b.data && a.type == b.type && a.shape == b.shape;
}

}  // namespace

void FiniteTrace::call(const Tensor& tensor, std::string name) {
  const auto known = std::find_if(named_.begin(), named_.end(),
                                  [&](const Named& named) { return is_same(named.tensor, tensor); });
  if (known != named_.end()) {
    known->name = std::move(name);
  } else {
    named_.push_back({tensor, std::move(name)});
  }
}

void FiniteTrace::look_at(const Context& context, const Tensor& tensor, const std::string& name) {
  if (first_ || !tensor) return;
  sum(context, tensor, total_);
  double total = 0;
  read(context, total_.data, &total, sizeof(total));
  if (!std::isfinite(total)) first_ = name;
}

void FiniteTrace::look_at_result(const Context& context, const char* operation, const Tensor& tensor) {
  const auto known = std::find_if(named_.begin(), named_.end(),
                                  [&](const Named& named) { return is_same(named.tensor, tensor); });
  if (known != named_.end()) last_ = known->name;
  look_at(
      context, tensor,
      known != named_.end() ? known->name : fmt::format("the result of {} after {}", operation, last_));
}

void FiniteTrace::matmul(const Context& context, const Tensor& a, Transpose transpose_a, const Tensor& b,
                         Transpose transpose_b, const Tensor& c, bool accumulate) {
  ProfiledBackend::matmul(context, a, transpose_a, b, transpose_b, c, accumulate);
  look_at_result(context, "matmul", c);
}

void FiniteTrace::embedding_forward(const Context& context, const Tensor& tokens, const Tensor& table,
                                    const Tensor& out) {
  ProfiledBackend::embedding_forward(context, tokens, table, out);
  look_at_result(context, "embedding_forward", out);
}

void FiniteTrace::rope(const Context& context, const AttentionShape& shape, const Tensor& qkv,
                       const Tensor& positions, const Tensor& table, bool inverse) {
  ProfiledBackend::rope(context, shape, qkv, positions, table, inverse);
  look_at_result(context, "rope", qkv);
}

void FiniteTrace::attention_forward(const Context& context, const AttentionShape& shape,
                                    const Tensor& qkv, const Documents& documents, const Tensor& out,
                                    const Tensor& log_sum_exp) {
  ProfiledBackend::attention_forward(context, shape, qkv, documents, out, log_sum_exp);
  look_at_result(context, "attention_forward", log_sum_exp);
  look_at_result(context, "attention_forward", out);
}

void FiniteTrace::cross_entropy(const Context& context, const Tensor& logits, const Tensor& targets,
                                const Tensor& weights, const Tensor& token_loss, const Tensor& dlogits) {
  ProfiledBackend::cross_entropy(context, logits, targets, weights, token_loss, dlogits);
  look_at(context, token_loss, "the loss of the tokens");
}

void FiniteTrace::residual_norm_forward(const Context& context, NormKind kind, const Tensor& x,
                                        const Tensor& delta, const Tensor& weight, double epsilon,
                                        const Tensor& y, const Tensor& rstd, const QuantTensor& saved,
                                        const RandomKey& key, const Tensor& counters) {
  ProfiledBackend::residual_norm_forward(context, kind, x, delta, weight, epsilon, y, rstd, saved, key,
                                         counters);
  look_at_result(context, "residual_norm_forward", x);
  look_at_result(context, "residual_norm_forward", y);
}

void FiniteTrace::swiglu_forward_save(const Context& context, const Tensor& gate_up,
                                      const Tensor& hidden, const QuantTensor& saved,
                                      const RandomKey& key, const Tensor& counters) {
  ProfiledBackend::swiglu_forward_save(context, gate_up, hidden, saved, key, counters);
  look_at_result(context, "swiglu_forward_save", hidden);
}

}  // namespace agoq
