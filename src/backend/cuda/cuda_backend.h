// CudaBackend: every operation on an NVIDIA GPU. Matrix products go to cuBLASLt, attention to cuDNN
// where the build has it, everything else to kernels of this folder.
//
// Tensors are FP32 or BF16, the compute type is FP32. Given the same input, quantised bytes are the CPU
// backend's; floats agree within the tolerances of backend/cuda_*_test.cpp.
//
// Operations are queued on the context's stream (cudaStream_t; null is the default stream) and return
// at once; `read` waits. A measuring context needs no GPU: operations take their workspace and return,
// so that a plan can be made on any machine.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace agoq::cuda {

struct Libraries;  // handles of cuBLASLt and cuDNN, made at first use (matmul.cpp, cudnn_attention.cpp)

class CudaBackend : public Backend {
 public:
  CudaBackend();
  ~CudaBackend() override;

  std::string_view name() const override { return "cuda"; }
  std::string description() const override;
  std::vector<BackendLibrary> found_libraries() override;
  Allocator& allocator() override;
  std::optional<DeviceMemory> device_memory() override;
  double time(const Context&, const std::function<void()>& work,
              const std::function<void()>& wait) override;
  /// True: no choice of algorithms by timing, and plain attention (matmul.cpp).
  void set_deterministic(bool deterministic) override;
  void set_attention_groups(int groups) override;
  /// A GPU, its driver, cuBLASLt and, where the build has it and the mode uses it, cuDNN.
  void expect_ready() override;
  void use_device(int index) override;
  Stream side_stream(int index) override;
  void order(Stream earlier, Stream later) override;
  void mark(Stream earlier, int number) override;
  void await_mark(int number, Stream later) override;

  // movement.cu
  void zero(const Context&, std::byte* memory, std::size_t bytes) override;
  void copy(const Context&, const Tensor& source, const Tensor& destination) override;
  void upload(const Context&, const void* source, std::byte* destination, std::size_t bytes) override;
  void read(const Context&, const std::byte* source, void* destination, std::size_t bytes) override;
  void add(const Context&, const Tensor& a, const Tensor& b, const Tensor& sum) override;
  void gather_rows(const Context&, const QuantTensor& source, const Tensor& rows,
                   const QuantTensor& destination) override;
  void scatter_rows(const Context&, const QuantTensor& source, const Tensor& rows,
                    const QuantTensor& destination) override;

  // matmul.cpp
  void matmul(const Context&, const Tensor& a, Transpose transpose_a, const Tensor& b,
              Transpose transpose_b, const Tensor& c, bool accumulate) override;

  // embedding.cu
  void embedding_forward(const Context&, const Tensor& tokens, const Tensor& table,
                         const Tensor& out) override;
  void embedding_backward(const Context&, const Tensor& tokens, const Tensor& dout,
                          const QuantTensor& dtable, const RandomKey& key,
                          const Tensor& counters) override;

  // norm.cu
  void norm_forward(const Context&, NormKind, const Tensor& x, const Tensor& weight, double epsilon,
                    const Tensor& y, const Tensor& rstd) override;
  void norm_backward(const Context&, NormKind, const Tensor& dy, const Tensor& x, const Tensor& weight,
                     double epsilon, const Tensor& rstd, const Tensor& dx,
                     const Tensor& dweight) override;

  // rope.cu
  void rope(const Context&, const AttentionShape&, const Tensor& qkv, const Tensor& positions,
            const Tensor& table, bool inverse) override;

  // attention.cu: cuDNN's where it can, else the plain kernels
  void attention_forward(const Context&, const AttentionShape&, const Tensor& qkv, const Documents&,
                         const Tensor& out, const Tensor& log_sum_exp) override;
  void attention_backward(const Context&, const AttentionShape&, const Tensor& dout, const Tensor& qkv,
                          const Tensor& out, const Tensor& log_sum_exp, const Documents&,
                          const Tensor& dqkv) override;

  // swiglu.cu
  void swiglu_forward(const Context&, const Tensor& gate_up, const Tensor& hidden) override;
  void swiglu_backward(const Context&, const Tensor& dhidden, const Tensor& gate_up,
                       const Tensor& dgate_up, const Tensor& hidden) override;

  // cross_entropy.cu
  void cross_entropy(const Context&, const Tensor& logits, const Tensor& targets, const Tensor& weights,
                     const Tensor& token_loss, const Tensor& dlogits) override;

  // reductions.cu
  void sum(const Context&, const Tensor& x, const Tensor& total) override;
  void sums_of_squares(const Context&, std::span<const QuantTensor> xs, const Tensor& totals) override;

  // quantize.cu
  void quantize(const Context&, const Tensor& source, const QuantTensor& destination,
                const RandomKey& key, const Tensor& counters) override;
  void dequantize(const Context&, const QuantTensor& source, const Tensor& destination) override;
  void accumulate(const Context&, const Tensor& addend, const QuantTensor& main, const RandomKey& key,
                  const Tensor& counters) override;

  // pieces.cu
  void add_pieces(const Context&, std::span<const QuantTensor> pieces, const QuantTensor& sum,
                  const RandomKey& key, const Tensor& counters, const Tensor& row_numbers) override;
  void add_pieces_naively(const Context&, std::span<const QuantTensor> pieces, const QuantTensor& sum,
                          float scale) override;
  void pieces_sums_of_squares(const Context&, std::span<const TensorPieces> tensors,
                              const Tensor& totals) override;

  // adamw.cu
  void adamw_update(const Context&, const AdamwTensors&, const AdamwStep&,
                    const RandomKey& key) override;
  void adamw_update_pieces(const Context&, std::span<const QuantTensor> gradients, const AdamwTensors&,
                           const AdamwStep&, const RandomKey& key) override;

  // initialise.cu
  void fill_normal(const Context&, const RandomKey& key, double deviation, const Tensor& x) override;
  void initialise_weight(const Context&, const Tensor& initial, MasterKind, const Tensor& weight,
                         const Tensor& master) override;

  // fused kernels
  void residual_norm_forward(const Context&, NormKind, const Tensor& x, const Tensor& delta,
                             const Tensor& weight, double epsilon, const Tensor& y, const Tensor& rstd,
                             const QuantTensor& saved, const RandomKey& key,
                             const Tensor& counters) override;  // norm.cu
  void norm_forward_saved(const Context&, NormKind, const QuantTensor& x, const Tensor& weight,
                          double epsilon, const Tensor& y) override;  // norm.cu
  void norm_backward_saved(const Context&, NormKind, const Tensor& dy, const QuantTensor& x,
                           const Tensor& weight, double epsilon, const Tensor& rstd, const Tensor& dx,
                           const Tensor& dweight) override;  // norm.cu
  void swiglu_forward_save(const Context&, const Tensor& gate_up, const Tensor& hidden,
                           const QuantTensor& saved, const RandomKey& key,
                           const Tensor& counters) override;  // swiglu.cu
  void swiglu_backward_saved(const Context&, const Tensor& dhidden, const QuantTensor& gate_up,
                             const Tensor& dgate_up, const Tensor& hidden) override;  // swiglu.cu
  void accumulate_weight_gradient(const Context&, const Tensor& dy, const Tensor& x,
                                  const QuantTensor& main, const RandomKey& key,
                                  const Tensor& counters) override;  // matmul.cpp

 private:
  Libraries& libraries();
  std::unique_ptr<Libraries> libraries_;
  std::vector<Stream> side_streams_;
  void* order_event_ = nullptr;  // cudaEvent_t; recorded and waited for at once
  std::vector<void*> marks_;     // cudaEvent_t
};

}  // namespace agoq::cuda
