// Matrix products by cuBLASLt.
//
//   c = op(a) op(b) (+ c)      BF16 x BF16 -> BF16 or FP32, FP32 x FP32 -> FP32; sums in FP32, no TF32
//
// Layout. A row-major matrix [rows, width] is, by columns, its transpose with stride `width`. So
// cuBLASLt is asked for c^T = op(b)^T op(a)^T: its first operand is our b, transposed where ours is.
//
// Algorithm. The first time a product is seen (shape, transposes, types, accumulate, alignment), the
// heuristic's first candidates run on the operands at hand and the fastest is kept; a product that
// accumulates keeps its c in host memory meanwhile and gets it back. That first call waits for the GPU
// and takes some 60 ms; a call while the stream is being captured does not time. Timing
// may choose otherwise in another run, and another algorithm sums in another order: with
// Libraries::deterministic the first candidate that runs is taken, which depends on the product, the GPU
// and the version of cuBLASLt alone (alignments are the product's too: every run of a plan lays its
// arenas out alike). Split-K partial sums stay in FP32. The workspace is kMatmulWorkspace for every
// product, in plans too.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device.h"
#include "backend/cuda/libraries.h"
#include "backend/operand_checks.h"
#include "core/median.h"

namespace agoq::cuda {
namespace {

/// NVIDIA's recommendation for Hopper. More buys nothing, less shuts out some split-K algorithms.
constexpr std::size_t kMatmulWorkspace = std::size_t{32} << 20;
constexpr int kCandidates = 8;
constexpr float kTimedMilliseconds = 60;
constexpr int kFewestRounds = 3, kMostRounds = 64;
/// The most that the FP32 product on its way to a quantised main gradient takes at once.
constexpr std::int64_t kSlabBytes = std::int64_t{64} << 20;
/// Slabs of up to kSlabBytes, a half and a quarter of it are timed: smaller ones stay in the cache,
/// larger ones fill the GPU better.
constexpr std::int64_t kSlabParts[] = {1, 2, 4};
/// The tile of cuBLASLt's usual Hopper algorithm: what slabs are counted in.
constexpr std::int64_t kTileRows = 128, kTileColumns = 256;

void expect_success(cublasStatus_t status, std::string_view operation) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(ErrorKind::kDevice, device_failure(operation, "cuBLASLt", cublasLtGetStatusString(status),
                                                 waits_for_each_operation()));
}

/// The largest power of two up to 256 that divides the address.
std::uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data) | 256u;
  return static_cast<std::uint32_t>(address & (~address + 1));
}

cudaDataType_t library_type(ElementType type) {
  return type == ElementType::kBf16 ? CUDA_R_16BF : CUDA_R_32F;
}

/// A row-major matrix, perhaps some columns of a wider one.
struct Matrix {
  std::byte* data = nullptr;
  ElementType type = ElementType::kFp32;
  std::int64_t rows = 0, width = 0;
  std::int64_t stride = 0;  // elements from row to row
};

Matrix matrix_of(const Tensor& tensor) {
  return {tensor.data, tensor.type, tensor.rows(), tensor.width(), tensor.width()};
}

Matrix columns_of(const Tensor& tensor, std::int64_t first, std::int64_t last) {
  return {tensor.data + first * static_cast<std::int64_t>(size_of(tensor.type)), tensor.type,
          tensor.rows(), last - first, tensor.width()};
}

struct Extents {
  std::int64_t m, n, k;
};

Extents check_product(std::string_view operation, const Matrix& a, bool flip_a, const Matrix& b,
                      bool flip_b, const Matrix& c) {
  const Extents e{flip_a ? a.width : a.rows, flip_b ? b.rows : b.width, flip_a ? a.rows : a.width};
  const std::int64_t inner = flip_b ? b.width : b.rows;
  check(inner == e.k && c.rows == e.m && c.width == e.n,
        "{}: op(a) is [{}, {}], op(b) [{}, {}] and c [{}, {}]: they do not multiply", operation, e.m,
        e.k, inner, e.n, c.rows, c.width);
  const bool exact =
      a.type == ElementType::kFp32 && b.type == ElementType::kFp32 && c.type == ElementType::kFp32;
  const bool brain = a.type == ElementType::kBf16 && b.type == ElementType::kBf16 &&
                     (c.type == ElementType::kBf16 || c.type == ElementType::kFp32);
  check(exact || brain,
        "{}: a is {}, b {} and c {}: on the GPU a and b are both bf16 (c bf16 or fp32) or all are fp32; "
        "convert with copy",
        operation, name_of(a.type), name_of(b.type), name_of(c.type));
  return e;
}

/// The operands of one call, in cuBLASLt's order: its first is our b.
struct Operands {
  const void* first;
  const void* second;
  void* result;
  std::byte* workspace;
  cudaStream_t stream;
};

ProductKey key_of(const Extents& e, const Matrix& a, bool flip_a, const Matrix& b, bool flip_b,
                  const Matrix& c, bool accumulate) {
  ProductKey key;
  key.m = e.n, key.n = e.m, key.k = e.k;
  key.a_stride = b.stride, key.b_stride = a.stride, key.c_stride = c.stride;
  key.transpose_a = flip_b, key.transpose_b = flip_a, key.accumulate = accumulate;
  key.operand_type = library_type(a.type), key.result_type = library_type(c.type);
  key.a_alignment = alignment_of(b.data), key.b_alignment = alignment_of(a.data);
  key.c_alignment = alignment_of(c.data);
  return key;
}

template <typename Value>
void set(cublasLtMatmulDescOpaque_t& operation, cublasLtMatmulDescAttributes_t attribute, Value value) {
  expect_success(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)), "matmul");
}

template <typename Value>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         Value value) {
  expect_success(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
                 "matmul");
}

/// Descriptors of a product, without an algorithm.
Product describe(const ProductKey& key) {
  Product product;
  expect_success(cublasLtMatmulDescInit(&product.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "matmul");
  set(product.operation, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(product.operation, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  const auto layout = [](cublasLtMatrixLayoutOpaque_t& of, cudaDataType_t type, std::int64_t rows,
                         std::int64_t columns, std::int64_t stride) {
    expect_success(cublasLtMatrixLayoutInit(&of, type, static_cast<std::uint64_t>(rows),
                                            static_cast<std::uint64_t>(columns), stride),
                   "matmul");
  };
  layout(product.a, key.operand_type, key.transpose_a ? key.k : key.m, key.transpose_a ? key.m : key.k,
         key.a_stride);
  layout(product.b, key.operand_type, key.transpose_b ? key.n : key.k, key.transpose_b ? key.k : key.n,
         key.b_stride);
  layout(product.c, key.result_type, key.m, key.n, key.c_stride);
  return product;
}

int find_candidates(cublasLtHandle_t handle, const ProductKey& key, Product& product,
                    std::array<cublasLtMatmulHeuristicResult_t, kCandidates>& candidates) {
  cublasLtMatmulPreferenceOpaque_t preference;
  expect_success(cublasLtMatmulPreferenceInit(&preference), "matmul");
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{kMatmulWorkspace});
  // Partial sums of split-K in the result's type would round BF16 sums in between.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.a_alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.b_alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.c_alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.c_alignment);
  int found = 0;
  expect_success(
      cublasLtMatmulAlgoGetHeuristic(handle, &product.operation, &product.a, &product.b, &product.c,
                                     &product.c, &preference, kCandidates, candidates.data(), &found),
      "matmul");
  check(found > 0, "matmul: cuBLASLt has no algorithm for a product of extents {} x {} x {}", key.n,
        key.m, key.k);
  return found;
}

cublasStatus_t run(cublasLtHandle_t handle, const ProductKey& key, Product& product,
                   const cublasLtMatmulAlgo_t& algorithm, const Operands& operands) {
  const float alpha = 1.0f, beta = key.accumulate ? 1.0f : 0.0f;
  return cublasLtMatmul(handle, &product.operation, &alpha, operands.first, &product.a, operands.second,
                        &product.b, &beta, operands.result, &product.c, operands.result, &product.c,
                        &algorithm, operands.workspace, kMatmulWorkspace, operands.stream);
}

/// Keeps the matrix c in host memory during its life.
class Kept {
 public:
  Kept(const ProductKey& key, const Operands& operands)
      : row_bytes_(static_cast<std::size_t>(key.m) * (key.result_type == CUDA_R_16BF ? 2 : 4)),
        stride_bytes_(row_bytes_ / static_cast<std::size_t>(key.m) *
                      static_cast<std::size_t>(key.c_stride)),
        rows_(static_cast<std::size_t>(key.n)),
        operands_(operands) {
    if (!key.accumulate) return;  // the real run overwrites it
    memory_.resize(row_bytes_ * rows_);
    cuda::expect_success(cudaMemcpy2DAsync(memory_.data(), row_bytes_, operands.result, stride_bytes_,
                                           row_bytes_, rows_, cudaMemcpyDeviceToHost, operands.stream),
                         "matmul");
    cuda::expect_success(cudaStreamSynchronize(operands.stream), "matmul");
  }
  void restore() const {
    if (memory_.empty()) return;
    cuda::expect_success(cudaMemcpy2DAsync(operands_.result, stride_bytes_, memory_.data(), row_bytes_,
                                           row_bytes_, rows_, cudaMemcpyHostToDevice, operands_.stream),
                         "matmul");
    cuda::expect_success(cudaStreamSynchronize(operands_.stream), "matmul");
  }

 private:
  std::size_t row_bytes_, stride_bytes_, rows_;
  Operands operands_;
  std::vector<std::byte> memory_;
};

/// Keeps a quantised tensor in host memory during its life.
class KeptGradient {
 public:
  KeptGradient(const QuantTensor& tensor, cudaStream_t stream) : stream_(stream) {
    const RowBytes row = row_bytes(tensor.format, tensor.grid);
    const std::pair<std::byte*, std::int64_t> planes[] = {{tensor.codes, row.codes},
                                                          {tensor.bits, row.bits},
                                                          {tensor.scales, row.scales},
                                                          {tensor.super, row.super}};
    for (const auto& [data, bytes] : planes) {
      if (bytes > 0)
        planes_.push_back(
            {data, std::vector<std::byte>(static_cast<std::size_t>(bytes * tensor.rows()))});
    }
    for (Plane& plane : planes_) copy(plane.kept.data(), plane.data, plane.kept.size());
  }
  void restore() const {
    for (const Plane& plane : planes_) copy(plane.data, plane.kept.data(), plane.kept.size());
  }

 private:
  struct Plane {
    std::byte* data;
    std::vector<std::byte> kept;
  };
  void copy(void* to, const void* from, std::size_t bytes) const {
    cuda::expect_success(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_),
                         "accumulate_weight_gradient");
    cuda::expect_success(cudaStreamSynchronize(stream_), "accumulate_weight_gradient");
  }

  cudaStream_t stream_;
  std::vector<Plane> planes_;
};

/// Index of the fastest of `count` ways of doing one thing, which run(i) queues; false where it cannot.
/// After a first time, which loads kernels, they take turns for kTimedMilliseconds without a pause: a
/// step runs at the power limit, and after a pause clocks are a fifth higher, where other ways win.
/// Their medians are compared.
template <typename Run>
int fastest(Libraries& libraries, cudaStream_t stream, std::string_view operation, int count, Run run) {
  libraries.cublas();  // makes the events
  const auto& events = libraries.events;
  std::array<std::vector<double>, kCandidates> milliseconds;
  std::array<bool, kCandidates> runs{};
  for (int i = 0; i < count; ++i) runs[static_cast<std::size_t>(i)] = run(i);
  float total = 0;
  for (int round = 0; round < kFewestRounds || (round < kMostRounds && total < kTimedMilliseconds);
       ++round) {
    cuda::expect_success(cudaEventRecord(events[0], stream), operation);
    for (int i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (runs[at]) run(i);
      cuda::expect_success(cudaEventRecord(events[at + 1], stream), operation);
    }
    cuda::expect_success(cudaEventSynchronize(events[static_cast<std::size_t>(count)]), operation);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      float elapsed = 0;
      cuda::expect_success(cudaEventElapsedTime(&elapsed, events[i], events[i + 1]), operation);
      milliseconds[i].push_back(runs[i] ? double{elapsed} : std::numeric_limits<double>::infinity());
      total += elapsed;
    }
  }
  std::array<double, kCandidates> medians{};
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) medians[i] = median(milliseconds[i]);
  return static_cast<int>(std::min_element(medians.begin(), medians.begin() + count) - medians.begin());
}

/// Whether the stream is being captured into a graph: nothing may wait then.
bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda::expect_success(cudaStreamIsCapturing(stream, &status), "matmul");
  return status != cudaStreamCaptureStatusNone;
}

void multiply(Libraries& libraries, const ProductKey& key, const Operands& operands) {
  const cublasLtHandle_t handle = libraries.cublas();
  if (const auto known = libraries.products.find(key); known != libraries.products.end()) {
    expect_success(run(handle, key, known->second, known->second.algorithm, operands), "matmul");
    return expect_launched("matmul");
  }
  Product product = describe(key);
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> candidates;
  const int found = find_candidates(handle, key, product, candidates);
  if (libraries.deterministic) {
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    for (int i = 0; i < found && status == CUBLAS_STATUS_NOT_SUPPORTED; ++i) {
      product.algorithm = candidates[static_cast<std::size_t>(i)].algo;
      status = run(handle, key, product, product.algorithm, operands);
      if (status == CUBLAS_STATUS_NOT_SUPPORTED) cudaGetLastError();  // not the next operation's
    }
    expect_success(status, "matmul");
    libraries.products.emplace(key, product);
    return expect_launched("matmul");
  }
  product.algorithm = candidates[0].algo;
  const bool timed = found > 1 && !is_capturing(operands.stream);
  if (timed) {
    const Kept kept(key, operands);
    const int best = fastest(libraries, operands.stream, "matmul", found, [&](int i) {
      const cublasStatus_t status =
          run(handle, key, product, candidates[static_cast<std::size_t>(i)].algo, operands);
      if (status != CUBLAS_STATUS_SUCCESS) cudaGetLastError();  // it is not the next operation's
      return status == CUBLAS_STATUS_SUCCESS;
    });
    product.algorithm = candidates[static_cast<std::size_t>(best)].algo;
    kept.restore();
  }
  // What was not timed for want of a moment to wait is timed when it is seen again.
  if (timed || found == 1) libraries.products.emplace(key, product);
  expect_success(run(handle, key, product, product.algorithm, operands), "matmul");
  expect_launched("matmul");
}

/// Rows of dW per slab: within kSlabBytes, whole tiles, and the fewest waves of tiles over the GPU's
/// multiprocessors; of equals the largest.
std::int64_t slab_rows(std::int64_t rows, std::int64_t columns, std::int64_t most,
                       std::int64_t multiprocessors) {
  const auto waves = [&](std::int64_t slab) {
    const std::int64_t tiles =
        (slab + kTileRows - 1) / kTileRows * ((columns + kTileColumns - 1) / kTileColumns);
    return (tiles + multiprocessors - 1) / multiprocessors;
  };
  if (most >= rows) return rows;
  std::int64_t best = most, least = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t slab = most; slab > 0; slab -= kTileRows) {
    const std::int64_t left = rows % slab;
    const std::int64_t total = rows / slab * waves(slab) + (left > 0 ? waves(left) : 0);
    if (total < least) least = total, best = slab;
  }
  return best;
}

/// The candidates for the rows of a slab, largest first.
std::vector<std::int64_t> slab_candidates(std::int64_t rows, std::int64_t columns, std::int64_t most,
                                          std::int64_t multiprocessors) {
  std::vector<std::int64_t> candidates;
  for (const std::int64_t parts : kSlabParts) {
    const std::int64_t limit =
        parts == 1 ? most : std::max(kTileRows, most / parts / kTileRows * kTileRows);
    const std::int64_t candidate = slab_rows(rows, columns, std::min(limit, most), multiprocessors);
    if (candidates.empty() || candidate < candidates.back()) candidates.push_back(candidate);
  }
  return candidates;
}

/// The most rows of dW that a slab may have: planned without a GPU.
std::int64_t most_slab_rows(std::int64_t rows, std::int64_t columns) {
  const std::int64_t fitting = kSlabBytes / (columns * static_cast<std::int64_t>(sizeof(float)));
  return std::min(rows, std::max(kTileRows, fitting / kTileRows * kTileRows));
}

}  // namespace

Libraries::Libraries() = default;

// Handle and events are left to the end of the process: by the time the backend, which is static, is
// destroyed, the driver may be gone.
Libraries::~Libraries() = default;

LibraryVersion Libraries::cublas_version() {
  const int version = static_cast<int>(cublasLtGetVersion());  // 130002: 13.0.2
  return {version / 10000, version % 10000 / 100};
}

cublasLtHandle_t Libraries::cublas() {
  if (cublas_ == nullptr) {
    device();  // says what is missing where there is no GPU
    check_cublas({CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR}, cublas_version());
    expect_success(cublasLtCreate(&cublas_), "opening cuBLASLt");
    for (cudaEvent_t& event : events) cuda::expect_success(cudaEventCreate(&event), "opening cuBLASLt");
  }
  return cublas_;
}

CudaBackend::CudaBackend() = default;
CudaBackend::~CudaBackend() = default;

Libraries& CudaBackend::libraries() {
  if (!libraries_) libraries_ = std::make_unique<Libraries>();
  return *libraries_;
}

std::vector<BackendLibrary> CudaBackend::found_libraries() {
  return {{"cuBLASLt", to_string(Libraries::cublas_version())},
          {"cuDNN", libraries().attention.description()}};
}

void CudaBackend::set_deterministic(bool deterministic) {
  Libraries& own = libraries();
  if (own.deterministic != deterministic) own.products.clear();
  own.deterministic = deterministic;
}

void CudaBackend::matmul(const Context& context, const Tensor& a, Transpose transpose_a, const Tensor& b,
                         Transpose transpose_b, const Tensor& c, bool accumulate) {
  check(a && b && c, "matmul: a, b and c are required, and one was not given");
  const bool flip_a = transpose_a == Transpose::kYes, flip_b = transpose_b == Transpose::kYes;
  const Matrix left = matrix_of(a), right = matrix_of(b), product = matrix_of(c);
  const Extents e = check_product("matmul", left, flip_a, right, flip_b, product);
  if (e.m == 0 || e.n == 0) return;
  check(e.k > 0, "matmul: the inner extent is 0: there is nothing to sum");
  const Arena::Scope scope(context.workspace);
  std::byte* workspace = context.workspace.take(kMatmulWorkspace);
  if (context.workspace.is_measuring()) return;
  multiply(libraries(), key_of(e, left, flip_a, right, flip_b, product, accumulate),
           {b.data, a.data, c.data, workspace, stream_of(context.stream)});
}

// Slabs of rows: the product of a slab, in FP32, is added to its rows of the main gradient while it is
// still in the cache, and the product of the whole tensor never exists. How many rows a slab has is
// timed like an algorithm, at the first gradient of a shape, and changes no sum.
void CudaBackend::accumulate_weight_gradient(const Context& context, const Tensor& dy, const Tensor& x,
                                             const QuantTensor& main, const RandomKey& key,
                                             const Tensor& counters) {
  constexpr std::string_view kName = "accumulate_weight_gradient";
  if (main.format.is_exact() && element_type_of(main.format) == ElementType::kFp32) {
    Backend::accumulate_weight_gradient(context, dy, x, main, key, counters);
    return;
  }
  check(dy && x, "{}: dy and x are required, and one was not given", kName);
  check(dy.rows() == x.rows() && dy.width() == main.rows() && x.width() == main.width(),
        "{}: dy {} and x {} do not make a gradient of [{}, {}]", kName, dy.shape.to_string(),
        x.shape.to_string(), main.rows(), main.width());
  if (main.rows() == 0 || main.width() == 0) return;
  check(dy.rows() > 0, "{}: there are no tokens to sum over", kName);
  const std::int64_t rows = main.rows(), columns = main.width();
  const std::int64_t most = most_slab_rows(rows, columns);
  const cudaStream_t stream = stream_of(context.stream);
  const Arena::Scope scope(context.workspace);
  const Tensor slab = context.workspace.take(ElementType::kFp32, Shape{most, columns});
  std::byte* workspace = context.workspace.take(kMatmulWorkspace);
  const bool measuring = context.workspace.is_measuring();
  const auto add_in_slabs = [&](std::int64_t step, const Tensor& counted) {
    for (std::int64_t first = 0; first < rows; first += step) {
      const std::int64_t last = std::min(first + step, rows);
      const Tensor product = slab.slice_rows(0, last - first);
      const Matrix left = columns_of(dy, first, last), right = matrix_of(x), result = matrix_of(product);
      const Extents e = check_product(kName, left, true, right, false, result);
      if (!measuring) {
        multiply(libraries(), key_of(e, left, true, right, false, result, false),
                 {right.data, left.data, product.data, workspace, stream});
      }
      accumulate(context, product, main.slice_rows(first, last), key, counted);
    }
  };
  if (measuring) return add_in_slabs(most, counters);

  Libraries& own = libraries();
  const WeightGradientKey shape{
      rows, columns, dy.rows(), dy.type, main.format.code, main.format.block, main.grid.segments};
  const auto known = own.slab_rows.find(shape);
  if (known != own.slab_rows.end()) return add_in_slabs(known->second, counters);
  const std::vector<std::int64_t> candidates =
      slab_candidates(rows, columns, most, device().multiprocessors);
  if (candidates.size() == 1 || own.deterministic || is_capturing(stream)) {
    return add_in_slabs(candidates.front(), counters);
  }
  const KeptGradient kept(main, stream);
  const int best = fastest(own, stream, kName, static_cast<int>(candidates.size()), [&](int i) {
    add_in_slabs(candidates[static_cast<std::size_t>(i)], {});  // the first time times algorithms
    return true;
  });
  kept.restore();
  own.slab_rows.emplace(shape, candidates[static_cast<std::size_t>(best)]);
  add_in_slabs(candidates[static_cast<std::size_t>(best)], counters);
}

}  // namespace agoq::cuda
