// FiniteTrace: a backend that looks at what each operation of a forward pass leaves, and remembers the
// first tensor that holds NaN or Inf.
//
// A sum in double precision is finite exactly if every FP32 or BF16 element is: each result is summed
// and the sum read back, so that a traced pass waits for every operation. It is for the one pass that
// explains a step that was refused.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backend/profiled_backend.h"

namespace agoq {

class FiniteTrace : public ProfiledBackend {
 public:
  /// total: fp64 [1] of the backend's memory, overwritten.
  FiniteTrace(Backend& backend, const Tensor& total) : ProfiledBackend(backend), total_(total) {}

  /// From now on this tensor, by place, type and shape, is called `name`.
  void call(const Tensor& tensor, std::string name);
  /// Looks at a tensor of this name.
  void look_at(const Context&, const Tensor& tensor, const std::string& name);
  const std::optional<std::string>& first() const { return first_; }

  void matmul(const Context&, const Tensor& a, Transpose transpose_a, const Tensor& b,
              Transpose transpose_b, const Tensor& c, bool accumulate) override;
  void embedding_forward(const Context&, const Tensor& tokens, const Tensor& table,
                         const Tensor& out) override;
  void rope(const Context&, const AttentionShape&, const Tensor& qkv, const Tensor& positions,
            const Tensor& table, bool inverse) override;
  void attention_forward(const Context&, const AttentionShape&, const Tensor& qkv, const Documents&,
                         const Tensor& out, const Tensor& log_sum_exp) override;
  void cross_entropy(const Context&, const Tensor& logits, const Tensor& targets, const Tensor& weights,
                     const Tensor& token_loss, const Tensor& dlogits) override;
  void residual_norm_forward(const Context&, NormKind, const Tensor& x, const Tensor& delta,
                             const Tensor& weight, double epsilon, const Tensor& y, const Tensor& rstd,
                             const QuantTensor& saved, const RandomKey& key,
                             const Tensor& counters) override;
  void swiglu_forward_save(const Context&, const Tensor& gate_up, const Tensor& hidden,
                           const QuantTensor& saved, const RandomKey& key,
                           const Tensor& counters) override;

 private:
  struct Named {
    Tensor tensor;
    std::string name;
  };
  void look_at_result(const Context&, const char* operation, const Tensor& tensor);

  Tensor total_;
  std::vector<Named> named_;
  std::string last_ = "the tokens";  // the last result that has a name
  std::optional<std::string> first_;
};

}  // namespace agoq
