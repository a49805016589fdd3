// Gated activation. gate_up [N, 2I] holds gate g then up u; with s = 1 / (1 + exp(-g)):
//   hidden = g s u          dg = dhidden u s (1 + g (1 - s))          du = dhidden g s
//
// Ownership. A warp takes a pair of groups of up to 1,024 elements (group_codec.cuh): one of a row's
// gate and the one of its up at the same columns, so that the packed gate_up, whose grid has gate's
// segments first, is made and read in the pass that computes. Both are read before anything is written:
// dgate_up may be gate_up itself. The warps of the grid share out the pairs.
//
// exp and the division are the hardware's approximations. With e = exp(-g) as 2^(-g log2 e), the
// product's rounding moves e by at most |g| 2^-24 relatively, ex2 and rcp by 2^-22 each, and s = 1 / (1
// + e) by no more than that: for |g| <= 10 the relative error of s is under 2e-6. Where e overflows or 1
// + e is above 2^126 (g < -87) s becomes zero. BF16 rounds by 2e-3.
//
// Kernels that read a packed gate_up use what it decodes to, in FP32; the plain composition rounds that
// to the tensors' type on its way through memory.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/group_vectors.cuh"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 12;  // four rounds of three

__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kLog2E = 1.44269504f;
  float e, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -kLog2E));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + e));
  return inverse;
}

/// The pairs of a launch. `aligned`: every unpacked tensor allows vector accesses.
struct Pairs {
  std::int64_t width;    // I
  std::uint32_t in_row;  // half the groups of a row of gate_up
  std::uint32_t count;
  bool aligned;
};

/// The pairs of a tensor of whole nf4 blocks.
struct WholePairs {
  WholeGroups groups;        // of gate_up
  std::int64_t width;        // I
  std::uint32_t in_row;      // half the groups of a row of gate_up
  std::uint32_t reciprocal;  // of in_row
  std::uint32_t count;

  struct Places {
    WholeGroups::Place gate, up;
    std::int64_t hidden;  // the number of the first element in the tensor `hidden`
  };
  __device__ __forceinline__ Places places(std::uint32_t pair) const {
    std::uint32_t row = __umulhi(pair, reciprocal);  // the quotient, or one less
    if (pair - row * in_row >= in_row) ++row;
    const WholeGroups::Place gate = groups.place(pair + row * in_row);
    return {gate, {gate.group + in_row, gate.element + width, gate.count}, gate.element - row * width};
  }
};
WholePairs whole_pairs(const QuantView& view, const Pairs& pairs) {
  return {whole_groups(view), pairs.width, pairs.in_row, reciprocal_of(pairs.in_row), pairs.count};
}

/// Calls visit(gate, up) with the groups of each pair that the warp owns.
template <typename Visit>
__device__ __forceinline__ void for_each_pair(const QuantView& view, const Pairs& pairs, Visit visit) {
  const std::uint32_t step = gridDim.x * (kThreads / kWarp);
  for (std::uint64_t index = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp; index < pairs.count;
       index += step) {
    const auto pair = static_cast<std::uint32_t>(index);
    const std::uint32_t row = pair / pairs.in_row, gate = pair - row * pairs.in_row;
    visit(group_of(view, row, gate), group_of(view, row, gate + pairs.in_row));
  }
}

/// hidden from gate_up, which is quantised into the view when kSave.
template <typename Storage, bool kSave, Code code>
__global__ void __launch_bounds__(kThreads, kSave ? 2 : 3)
    forward_kernel(QuantView view, Pairs pairs, const Storage* gate_up, Storage* hidden, RandomWords key,
                   std::int64_t* counters) {
  await_predecessors();
  LaneCounts counts;
  for_each_pair(view, pairs, [&](const Group& gate, const Group& up) {
    const Storage* const row = gate_up + gate.row * 2 * pairs.width;
    PackedGroup<Storage> g_packed, u_packed;
    load_packed_group(gate, row, pairs.aligned, g_packed);
    load_packed_group(up, row, pairs.aligned, u_packed);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float g[kVector], u[kVector];
      widen(g_packed[chunk], g);
      widen(u_packed[chunk], u);
#pragma unroll
      for (int i = 0; i < kVector; ++i) g[i] = g[i] * sigmoid(g[i]) * u[i];
      store_part(gate, hidden + gate.row * pairs.width, pairs.aligned, chunk, g);
    }
    if constexpr (kSave) {
      Group group = gate;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {  // one copy of the encoder's code for both
        GroupValues values;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          widen(g_packed[chunk], values[chunk]);
          g_packed[chunk] = u_packed[chunk];
        }
        encode_group<code>(view, group, values, key, counts);
        group = up;
      }
    }
  });
  if constexpr (kSave) counts.add_to(counters);
}

constexpr int kWholeForwardThreads = 128;
/// hidden from gate_up, which is quantised, where has_whole_nf4_blocks and everything is aligned; a pair
/// per warp. Small blocks that come and go stay in the order of memory; ones that stay and walk the
/// tensor drift apart, and memory is slower where it is used in many places at once.
__global__ void __launch_bounds__(kWholeForwardThreads, 6)
    whole_forward_kernel(QuantView view, WholePairs pairs, const Bf16* gate_up, Bf16* hidden,
                         std::int64_t* counters) {
  const WholeNf4Encoder encoder(view);
  const int begin = lane_index() * kVector;
  LaneCounts counts;
  const std::uint32_t pair = blockIdx.x * (kWholeForwardThreads / kWarp) + threadIdx.x / kWarp;
  await_predecessors();
  if (pair >= pairs.count) return;  // the whole warp
  const WholePairs::Places places = pairs.places(pair);
  PackedGroup<Bf16> packed, u_packed;
  load_whole_group(gate_up + places.gate.element, places.gate.count, packed);
  load_whole_group(gate_up + places.up.element, places.gate.count, u_packed);
  Bf16* const out = hidden + places.hidden + begin;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * kWarp * kVector >= places.gate.count) break;  // the whole warp
    float g[kVector], u[kVector];
    widen(packed[chunk], g);
    widen(u_packed[chunk], u);
#pragma unroll
    for (int i = 0; i < kVector; ++i) g[i] = g[i] * sigmoid(g[i]) * u[i];
    if (chunk * kWarp * kVector + begin < places.gate.count) {
      store_vector(g, out + chunk * kWarp * kVector);
    }
  }
  WholeGroups::Place place = places.gate;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {  // one copy of the encoder's code for both
    encoder.encode(packed, place, gate_up + place.element, counts);
    place = places.up;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) packed[chunk] = u_packed[chunk];
  }
  counts.add_to(counters);
}

/// hidden, dg and du of one vector: g becomes du, u becomes dg.
__device__ __forceinline__ void differentiate(const float (&dhidden)[kVector], float (&g)[kVector],
                                              float (&u)[kVector], float (&hidden)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float s = sigmoid(g[i]);
    const float activated = g[i] * s;
    hidden[i] = activated * u[i];
    u[i] = dhidden[i] * u[i] * s * fmaf(g[i], 1.0f - s, 1.0f);
    g[i] = dhidden[i] * activated;
  }
}

/// dgate_up, and hidden unless it is null, from a gate_up that is packed or not.
template <typename Storage, Code code>
__global__ void __launch_bounds__(kThreads, sizeof(Storage) == 2 ? 2 : 1)
    backward_kernel(QuantView view, Pairs pairs, const Storage* dhidden, Storage* dgate_up,
                    Storage* hidden) {
  await_predecessors();
  for_each_pair(view, pairs, [&](const Group& gate, const Group& up) {
    PackedGroup<Storage> dhidden_packed;
    load_packed_group(gate, dhidden + gate.row * pairs.width, pairs.aligned, dhidden_packed);
    GroupValues g, u;
    decode_group<code>(view, gate, g);
    decode_group<code>(view, up, u);
    Storage* const row = dgate_up + gate.row * 2 * pairs.width;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float d[kVector], out[kVector];
      widen(dhidden_packed[chunk], d);
      differentiate(d, g[chunk], u[chunk], out);
      if (hidden != nullptr) {
        store_part(gate, hidden + gate.row * pairs.width, pairs.aligned, chunk, out);
      }
      store_part(gate, row, pairs.aligned, chunk, u[chunk]);
      store_part(up, row, pairs.aligned, chunk, g[chunk]);
    }
  });
}

/// The same where has_whole_nf4_blocks and everything is aligned: decoded vector by vector, in few
/// registers.
__global__ void __launch_bounds__(kThreads, 3)
    whole_backward_kernel(QuantView given_view, Pairs pairs, const Bf16* dhidden, Bf16* dgate_up,
                          Bf16* hidden) {
  await_predecessors();
  const QuantView view = with_known_layout(given_view);
  const float level = group_detail::level_of_lane<Code::kNf4>();
  for_each_pair(view, pairs, [&](const Group& gate, const Group& up) {
    const std::int64_t begin = gate.row * pairs.width + gate.column;
    PackedGroup<Bf16> dhidden_packed;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      dhidden_packed[chunk] = {};
      if (holds(gate, chunk)) {
        load_packed(dhidden + begin + vector_begin(chunk), dhidden_packed[chunk]);
      }
    }
    WholeNf4Group g_packed, u_packed;
    g_packed.load(gate);
    u_packed.load(up);
    Bf16* const row = dgate_up + gate.row * 2 * pairs.width;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (!any_holds(gate, chunk)) break;
      float d[kVector], g[kVector], u[kVector], out[kVector];
      widen(dhidden_packed[chunk], d);
      g_packed.decode(chunk, level, g);
      u_packed.decode(chunk, level, u);
      differentiate(d, g, u, out);
      if (!holds(gate, chunk)) continue;
      if (hidden != nullptr) store_vector(out, hidden + begin + vector_begin(chunk));
      store_vector(u, row + gate.column + vector_begin(chunk));
      store_vector(g, row + up.column + vector_begin(chunk));
    }
  });
}

/// gate_up as gate's segments and as many of up. An exact tensor lies the same in any grid; a packed one
/// whose segments are odd in number has groups across the middle of a row.
QuantView view_of_halves(QuantTensor gate_up) {
  if (gate_up.format.is_exact()) gate_up.grid.segments = 2;
  return view_of(gate_up);
}
bool is_fused(std::string_view operation, ElementType type, const QuantTensor& gate_up) {
  if (!gate_up.format.is_exact() && gate_up.grid.segments % 2 != 0) return false;
  return has_fused_path(operation, type, view_of_halves(gate_up));
}

Pairs pairs_of(const QuantView& view, const Tensor& hidden, bool aligned) {
  const std::uint32_t in_row = view.groups_per_row() / 2;
  return {hidden.width(), in_row, view.groups / 2, aligned};
}

template <typename Storage>
bool aligned(const QuantView& view, const Tensor& tensor) {
  return !tensor || vector_aligned<Storage>(tensor.data, view.segment_length);
}

unsigned blocks_for(const Pairs& pairs) {
  constexpr std::int64_t kWarps = kThreads / kWarp;
  return grid_blocks((std::int64_t{pairs.count} + kWarps - 1) / kWarps, kBlocksPerMultiprocessor);
}

void refuse_fp64(std::string_view operation, const QuantTensor& tensor) {
  check(tensor.format.code != Code::kFp64, "{}: fp64 tensors exist on the CPU only", operation);
}

void launch_forward(std::string_view operation, const Context& context, const Tensor& gate_up,
                    const Tensor& hidden, const QuantTensor& saved, const RandomKey& key,
                    const Tensor& counters) {
  const QuantView view = view_of_halves(saved ? saved : as_quant_tensor(gate_up));
  for_storage(operation, gate_up.type, [&]<typename Storage>() {
    const Pairs pairs =
        pairs_of(view, hidden, aligned<Storage>(view, gate_up) && aligned<Storage>(view, hidden));
    std::int64_t* const counted = counters ? counters.as<std::int64_t>() : nullptr;
    const auto launch = [&](auto kernel) {
      Launch{blocks_for(pairs), kThreads, 0, stream_of(context.stream)}(
          kernel, view, pairs, gate_up.as<Storage>(), hidden.as<Storage>(), mixed_key(key), counted);
    };
    if (saved) {
      for_fused_path<Storage>(view, [&]<Code code>() {
        if constexpr (code == Code::kNf4 && std::is_same_v<Storage, Bf16>) {
          if (pairs.aligned && has_whole_nf4_blocks(view)) {
            constexpr std::uint32_t kWarps = kWholeForwardThreads / kWarp;
            const unsigned blocks = pairs.count / kWarps + (pairs.count % kWarps != 0);
            Launch{blocks, kWholeForwardThreads, 0, stream_of(context.stream)}(
                whole_forward_kernel, view, whole_pairs(view, pairs), gate_up.as<Bf16>(),
                hidden.as<Bf16>(), counted);
            return;
          }
        }
        launch(forward_kernel<Storage, true, code>);
      });
    } else {
      launch(forward_kernel<Storage, false, kAnyCode>);
    }
  });
  expect_launched(operation);
}

void launch_backward(std::string_view operation, const Context& context, const Tensor& dhidden,
                     const QuantTensor& gate_up, const Tensor& dgate_up, const Tensor& hidden) {
  const QuantView view = view_of_halves(gate_up);
  for_storage(operation, dhidden.type, [&]<typename Storage>() {
    const Pairs pairs = pairs_of(view, dhidden,
                                 aligned<Storage>(view, dhidden) && aligned<Storage>(view, dgate_up) &&
                                     aligned<Storage>(view, hidden));
    const auto launch = [&](auto kernel) {
      Launch{blocks_for(pairs), kThreads, 0, stream_of(context.stream)}(
          kernel, view, pairs, dhidden.as<Storage>(), dgate_up.as<Storage>(),
          hidden ? hidden.as<Storage>() : nullptr);
    };
    for_fused_path<Storage>(view, [&]<Code code>() {
      if constexpr (code == Code::kNf4 && std::is_same_v<Storage, Bf16>) {
        if (pairs.aligned && has_whole_nf4_blocks(view)) {
          Launch{blocks_for(pairs), kThreads, 0, stream_of(context.stream)}(
              whole_backward_kernel, view, pairs, dhidden.as<Bf16>(), dgate_up.as<Bf16>(),
              hidden ? hidden.as<Bf16>() : nullptr);
          return;
        }
      }
      launch(backward_kernel<Storage, code>);
    });
  });
  expect_launched(operation);
}

}  // namespace

void CudaBackend::swiglu_forward(const Context& context, const Tensor& gate_up, const Tensor& hidden) {
  expect_gate_up("swiglu_forward", gate_up, hidden, "hidden");
  if (context.workspace.is_measuring() || hidden.count() == 0) return;
  launch_forward("swiglu_forward", context, gate_up, hidden, {}, {}, {});
}

void CudaBackend::swiglu_backward(const Context& context, const Tensor& dhidden, const Tensor& gate_up,
                                  const Tensor& dgate_up, const Tensor& hidden) {
  const std::int64_t width = expect_gate_up("swiglu_backward", gate_up, dhidden, "dhidden");
  expect("swiglu_backward", "dgate_up", dgate_up, gate_up.type, gate_up.rows(), 2 * width);
  if (hidden) expect("swiglu_backward", "hidden", hidden, gate_up.type, gate_up.rows(), width);
  if (context.workspace.is_measuring() || dhidden.count() == 0) return;
  launch_backward("swiglu_backward", context, dhidden, as_quant_tensor(gate_up), dgate_up, hidden);
}

void CudaBackend::swiglu_forward_save(const Context& context, const Tensor& gate_up,
                                      const Tensor& hidden, const QuantTensor& saved,
                                      const RandomKey& key, const Tensor& counters) {
  const char* const operation = "swiglu_forward_save";
  expect_gate_up(operation, gate_up, hidden, "hidden");
  expect_counters(operation, counters);
  if (saved) {
    expect_same_shape(operation, gate_up, saved);
    refuse_fp64(operation, saved);
  }
  if (context.workspace.is_measuring() || hidden.count() == 0) return;
  if (saved && !is_fused(operation, gate_up.type, saved)) {
    Backend::swiglu_forward_save(context, gate_up, hidden, saved, key, counters);
    return;
  }
  launch_forward(operation, context, gate_up, hidden, saved, key, counters);
}

void CudaBackend::swiglu_backward_saved(const Context& context, const Tensor& dhidden,
                                        const QuantTensor& gate_up, const Tensor& dgate_up,
                                        const Tensor& hidden) {
  const char* const operation = "swiglu_backward_saved";
  const std::int64_t rows = gate_up.rows(), width = dhidden.width();
  check(gate_up.width() == 2 * width,
        "{}: gate_up has {} columns and dhidden {}: twice as many belong there", operation,
        gate_up.width(), width);
  expect(operation, "dhidden", dhidden, dhidden.type, rows, width);
  expect(operation, "dgate_up", dgate_up, dhidden.type, rows, 2 * width);
  if (hidden) expect(operation, "hidden", hidden, dhidden.type, rows, width);
  refuse_fp64(operation, gate_up);
  if (!is_fused(operation, dhidden.type, gate_up)) {
    Backend::swiglu_backward_saved(context, dhidden, gate_up, dgate_up, hidden);
    return;
  }
  if (context.workspace.is_measuring() || dhidden.count() == 0) return;
  launch_backward(operation, context, dhidden, gate_up, dgate_up, hidden);
}

}  // namespace agoq::cuda
