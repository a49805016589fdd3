// CpuBackend: the plain and right implementation that judges every other backend. Each operation is
// one readable loop that the compiler vectorises; matrix products go to oneDNN.
//
// This folder is compiled once per instruction set, each time into its own namespace AGOQ_CPU_ISA.
#pragma once

#include "backend/backend.h"

#ifndef AGOQ_CPU_ISA
#define AGOQ_CPU_ISA baseline
#endif

namespace agoq::cpu::AGOQ_CPU_ISA {

class CpuBackend : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  std::string description() const override;
  Allocator& allocator() override { return host_allocator(); }
  std::optional<DeviceMemory> device_memory() override { return std::nullopt; }
  double time(const Context&, const std::function<void()>& work,
              const std::function<void()>& wait) override;

  // movement.cpp
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

  // embedding.cpp
  void embedding_forward(const Context&, const Tensor& tokens, const Tensor& table,
                         const Tensor& out) override;
  void embedding_backward(const Context&, const Tensor& tokens, const Tensor& dout,
                          const QuantTensor& dtable, const RandomKey& key,
                          const Tensor& counters) override;

  // norm.cpp
  void norm_forward(const Context&, NormKind, const Tensor& x, const Tensor& weight, double epsilon,
                    const Tensor& y, const Tensor& rstd) override;
  void norm_backward(const Context&, NormKind, const Tensor& dy, const Tensor& x, const Tensor& weight,
                     double epsilon, const Tensor& rstd, const Tensor& dx,
                     const Tensor& dweight) override;

  // rope.cpp
  void rope(const Context&, const AttentionShape&, const Tensor& qkv, const Tensor& positions,
            const Tensor& table, bool inverse) override;

  // attention.cpp
  void attention_forward(const Context&, const AttentionShape&, const Tensor& qkv, const Documents&,
                         const Tensor& out, const Tensor& log_sum_exp) override;
  void attention_backward(const Context&, const AttentionShape&, const Tensor& dout, const Tensor& qkv,
                          const Tensor& out, const Tensor& log_sum_exp, const Documents&,
                          const Tensor& dqkv) override;

  // swiglu.cpp
  void swiglu_forward(const Context&, const Tensor& gate_up, const Tensor& hidden) override;
  void swiglu_backward(const Context&, const Tensor& dhidden, const Tensor& gate_up,
                       const Tensor& dgate_up, const Tensor& hidden) override;

  // cross_entropy.cpp
  void cross_entropy(const Context&, const Tensor& logits, const Tensor& targets, const Tensor& weights,
                     const Tensor& token_loss, const Tensor& dlogits) override;

  // reductions.cpp
  void sum(const Context&, const Tensor& x, const Tensor& total) override;
  void sums_of_squares(const Context&, std::span<const QuantTensor> xs, const Tensor& totals) override;
  void pieces_sums_of_squares(const Context&, std::span<const TensorPieces> tensors,
                              const Tensor& totals) override;

  // quantize.cpp
  void quantize(const Context&, const Tensor& source, const QuantTensor& destination,
                const RandomKey& key, const Tensor& counters) override;
  void dequantize(const Context&, const QuantTensor& source, const Tensor& destination) override;
  void accumulate(const Context&, const Tensor& addend, const QuantTensor& main, const RandomKey& key,
                  const Tensor& counters) override;
  void add_pieces(const Context&, std::span<const QuantTensor> pieces, const QuantTensor& sum,
                  const RandomKey& key, const Tensor& counters, const Tensor& row_numbers) override;
  void add_pieces_naively(const Context&, std::span<const QuantTensor> pieces, const QuantTensor& sum,
                          float scale) override;

  // adamw.cpp
  void adamw_update(const Context&, const AdamwTensors&, const AdamwStep&,
                    const RandomKey& key) override;

  // initialise.cpp
  void fill_normal(const Context&, const RandomKey& key, double deviation, const Tensor& x) override;
  void initialise_weight(const Context&, const Tensor& initial, MasterKind, const Tensor& weight,
                         const Tensor& master) override;
};

/// The backend of this build of the folder.
Backend& backend();

}  // namespace agoq::cpu::AGOQ_CPU_ISA
