// Gated activation. gate_up [N, 2I] holds gate g then up u; with s = 1 / (1 + exp(-g)):
//   hidden = g s u          dg = dhidden u s (1 + g (1 - s))          du = dhidden g s
// Every element by itself; a row belongs to one thread.
#include "backend/cpu/exponential.h"
#include "backend/cpu/storage.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

// exp only of what is not positive, so that it cannot overflow.
template <typename T>
AGOQ_HD T sigmoid(T x) {
  const T e = exponential(x < T{0} ? x : -x);
  return (x < T{0} ? e : T{1}) / (T{1} + e);
}

}  // namespace

void CpuBackend::swiglu_forward(const Context& context, const Tensor& gate_up, const Tensor& hidden) {
  const std::int64_t width = expect_gate_up("swiglu_forward", gate_up, hidden, "hidden");
  if (context.workspace.is_measuring()) return;
  for_storage("swiglu_forward", gate_up.type, [&]<typename Storage>() {
    using T = Compute<Storage>;
    const Storage* in = gate_up.as<Storage>();
    Storage* out = hidden.as<Storage>();
    const std::int64_t rows = gate_up.rows();
#pragma omp parallel for schedule(static) if (rows * width > kSerialElements)
    for (std::int64_t row = 0; row < rows; ++row) {
      const Storage* gate = in + row * 2 * width;
      const Storage* up = gate + width;
      Storage* hidden_row = out + row * width;
      for (std::int64_t i = 0; i < width; ++i) {
        const T g = load(gate[i]);
        store(g * sigmoid(g) * load(up[i]), hidden_row[i]);
      }
    }
  });
}

void CpuBackend::swiglu_backward(const Context& context, const Tensor& dhidden, const Tensor& gate_up,
                                 const Tensor& dgate_up, const Tensor& hidden) {
  const std::int64_t width = expect_gate_up("swiglu_backward", gate_up, dhidden, "dhidden");
  expect("swiglu_backward", "dgate_up", dgate_up, gate_up.type, gate_up.rows(), 2 * width);
  if (hidden) expect("swiglu_backward", "hidden", hidden, gate_up.type, gate_up.rows(), width);
  if (context.workspace.is_measuring()) return;
  for_storage("swiglu_backward", gate_up.type, [&]<typename Storage>() {
    using T = Compute<Storage>;
    const Storage* in = gate_up.as<Storage>();
    const Storage* dout = dhidden.as<Storage>();
    Storage* din = dgate_up.as<Storage>();
    Storage* out = hidden ? hidden.as<Storage>() : nullptr;
    const std::int64_t rows = gate_up.rows();
#pragma omp parallel for schedule(static) if (rows * width > kSerialElements)
    for (std::int64_t row = 0; row < rows; ++row) {
      const Storage* gate = in + row * 2 * width;
      const Storage* up = gate + width;
      const Storage* dhidden_row = dout + row * width;
      Storage* dgate = din + row * 2 * width;
      Storage* dup = dgate + width;
      // dgate_up may be gate_up itself: an element is read before anything is written in its place, and
      // no other element is read there. `omp simd` tells that to the compiler.
      if (out == nullptr) {
#pragma omp simd
        for (std::int64_t i = 0; i < width; ++i) {
          const T g = load(gate[i]), u = load(up[i]), d = load(dhidden_row[i]);
          const T s = sigmoid(g);
          store(d * u * s * (T{1} + g * (T{1} - s)), dgate[i]);
          store(d * g * s, dup[i]);
        }
        continue;
      }
      Storage* hidden_row = out + row * width;
#pragma omp simd
      for (std::int64_t i = 0; i < width; ++i) {
        const T g = load(gate[i]), u = load(up[i]), d = load(dhidden_row[i]);
        const T s = sigmoid(g);
        store(g * s * u, hidden_row[i]);
        store(d * u * s * (T{1} + g * (T{1} - s)), dgate[i]);
        store(d * g * s, dup[i]);
      }
    }
  });
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA
