#include "backend/onednn_matmul.h"

#include <omp.h>

#include <cstdlib>
#include <dnnl.hpp>
#include <map>
#include <memory>
#include <mutex>

#include "core/error.h"

namespace agoq {
namespace {

// With AVX-512, oneDNN 2.6 takes kernels that allocate several KB at every call; those for AVX2 do not,
// and give the same sums on every processor that has it. Where ONEDNN_MAX_CPU_ISA is set it decides.
const dnnl::engine& engine() {
  static const dnnl::engine engine = [] {
    if (std::getenv("ONEDNN_MAX_CPU_ISA") == nullptr) dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx2);
    return dnnl::engine(dnnl::engine::kind::cpu, 0);
  }();
  return engine;
}

// The one place where oneDNN 2 and 3 differ: operation descriptors are gone in 3.
dnnl::matmul::primitive_desc describe(const dnnl::memory::desc& a, const dnnl::memory::desc& b,
                                      const dnnl::memory::desc& c,
                                      const dnnl::primitive_attr& attributes) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine(), a, b, c, attributes};
#else
  return {dnnl::matmul::desc(a, b, c), attributes, engine()};
#endif
}

dnnl::memory::desc matrix(std::int64_t rows, std::int64_t columns, const dnnl::memory::dims& strides) {
  return {{rows, columns}, dnnl::memory::data_type::f32, strides};
}

// oneDNN plans for as many threads as OpenMP would start in the thread that builds the primitive.
class OneThread {
 public:
  OneThread() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(threads_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int threads_;
};

}  // namespace

class OnednnMatmul {
 public:
  explicit OnednnMatmul(const MatmulTile& tile)
      : a_(matrix(tile.rows, tile.depth, {1, tile.a_stride})),
        b_(matrix(tile.depth, tile.columns, {tile.b_stride, 1})),
        c_(matrix(tile.rows, tile.columns, {tile.c_stride, 1})) {
    const OneThread one_thread;
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (tile.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
    const auto description = describe(a_, b_, c_, attributes);
    scratchpad_ = description.scratchpad_desc();
    primitive_ = dnnl::matmul(description);
  }

  std::size_t scratch_bytes() const { return scratchpad_.get_size(); }

  void run(const float* a, const float* b, float* c, std::byte* scratch) const {
    dnnl::stream stream(engine());
    const auto memory = [](const dnnl::memory::desc& desc, const void* data) {
      return dnnl::memory(desc, engine(), const_cast<void*>(data));
    };
    primitive_.execute(stream, {{DNNL_ARG_SRC, memory(a_, a)},
                                {DNNL_ARG_WEIGHTS, memory(b_, b)},
                                {DNNL_ARG_DST, memory(c_, c)},
                                {DNNL_ARG_SCRATCHPAD, memory(scratchpad_, scratch)}});
  }

 private:
  dnnl::memory::desc a_, b_, c_, scratchpad_;
  dnnl::matmul primitive_;
};

const OnednnMatmul& onednn_matmul(const MatmulTile& tile) {
  static std::mutex mutex;
  static std::map<MatmulTile, std::unique_ptr<OnednnMatmul>> cache;
  const std::lock_guard lock(mutex);
  std::unique_ptr<OnednnMatmul>& entry = cache[tile];
  if (entry == nullptr) {
    try {
      entry = std::make_unique<OnednnMatmul>(tile);
    } catch (const dnnl::error& error) {
      fail("matmul: oneDNN has no primitive for a tile of {} x {} x {}: {}", tile.rows, tile.columns,
           tile.depth, error.what());
    }
  }
  return *entry;
}

std::size_t scratch_bytes(const OnednnMatmul& matmul) { return matmul.scratch_bytes(); }

void run(const OnednnMatmul& matmul, const float* a, const float* b, float* c, std::byte* scratch) {
  matmul.run(a, b, c, scratch);
}

}  // namespace agoq
