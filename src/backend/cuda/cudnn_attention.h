// Attention by cuDNN (cudnn-frontend): one graph per shape and direction. Host code only.
//
// Present in builds where cudnn.h and cudnn-frontend's headers were found; cuDNN itself is opened at run
// time. Where either is missing, or cuDNN does not support a shape, callers use the plain kernels.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "backend/backend.h"

namespace agoq::cuda {

class CudnnAttention {
 public:
  CudnnAttention();
  ~CudnnAttention();

  /// Whether cuDNN will compute attention of this shape; the first call that finds no cuDNN writes one
  /// line of warning. May build the graph, which takes seconds once per shape.
  bool serves(const AttentionShape& shape, ElementType type, const Documents& documents,
              std::int64_t tokens, bool backward);
  /// Bytes of workspace for a shape that it serves.
  std::size_t workspace_bytes(const AttentionShape& shape, const Documents& documents,
                              std::int64_t tokens, bool backward);
  void forward(const Context& context, const AttentionShape& shape, const Tensor& qkv,
               const Documents& documents, const Tensor& out, const Tensor& log_sum_exp,
               std::byte* workspace);
  void backward(const Context& context, const AttentionShape& shape, const Tensor& dout,
                const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp,
                const Documents& documents, const Tensor& dqkv, std::byte* workspace);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace agoq::cuda
