// Attention by cuDNN (through the header-only cudnn-frontend): one graph per shape and direction, kept.
// BF16 only. Host code only.
//
// Which tokens belong together:
//   dense    all documents have the same length (count * longest = N): they are the batch dimension;
//   ragged   else: the batch dimension is the number of documents rounded up to a power of two (so that
//            few graphs serve all batches), with padding masks and offsets that a kernel makes from
//            Documents::starts in the workspace. Documents beyond the last have no tokens.
//
// Ragged backward. With sums sized per token (the frontend's max_total_seq_len) cuDNN 9.19 is right only
// where dq, dk and dv have the strides and offsets of q, k and v: elsewhere it gives NaN or executes an
// illegal instruction. The frontend sizes these sums by the width of a token's memory, so in interleaved
// tensors they would take 221 KB per token at 32/8 heads of 128. So q, k and v are copied to tensors of
// their own, and the gradients back from such; and one part of the heads after the other, as many as it
// takes not to need more memory than a dense batch (33 KB per token there; 4 parts take 19).
//
// Workspace. What cuDNN asks for is known once a graph is built, which needs cuDNN and takes a second or
// more, and differs between dense and ragged graphs; the plan needs one figure that holds for every
// batch. So callers take planned_bytes(): the tensors that cuDNN keeps, which is what it asks for on an
// H200 at 16,384 to 131,072 tokens to 256 bytes, and 4 MiB; a graph that asks for more is not used.
//
// Groups. Nearly all of it is the backward pass's, in proportion to the heads. Where a plan has no room
// for it (Backend::set_attention_groups), backward calls one group of kv heads with its query heads
// after the other, in the workspace of one. A head's gradients are the same sums in either case.
//
// cuDNN is opened at run time. Where it or its headers are missing, nothing is available and the plain
// kernels of attention.cu serve; a run refuses to start so slow where the build had cuDNN (problem()).
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

  /// Whether cuDNN was found; needs no GPU. The first call that finds none writes a line to stderr.
  bool available();
  /// Its version, or why there is none.
  std::string description();
  /// What is wrong with the cuDNN that this build asks for, and what to do; empty where it serves, or
  /// the build has none.
  const std::string& problem();
  /// The workspace to take for a call; backward in `groups` calls, a divisor of kv_heads.
  static std::size_t planned_bytes(const AttentionShape& shape, std::int64_t tokens, bool backward,
                                   int groups);

  /// These return false, having done nothing, when cuDNN does not serve the shape within the workspace.
  bool forward(const Context& context, const AttentionShape& shape, const Tensor& qkv,
               const Documents& documents, const Tensor& out, const Tensor& log_sum_exp,
               std::byte* workspace);
  bool backward(const Context& context, const AttentionShape& shape, const Tensor& dout,
                const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp,
                const Documents& documents, const Tensor& dqkv, int groups, std::byte* workspace);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace agoq::cuda
