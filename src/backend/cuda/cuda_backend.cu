#include "backend/cuda/cuda_backend.h"

#include "backend/cuda/device.h"
#include "backend/cuda/libraries.h"
#include "backend/gpu_requirements.h"

namespace agoq::cuda {
namespace {

// What the free memory of an H200 falls by during a run beside the arenas, whose allocations are rounded
// up to kPieceBytes: kernels that are loaded at their first launch, cuBLASLt's and cuDNN's own
// memory. 14.0 MiB in fourteen runs of different shapes, 16.0 in two of 81,920 and 131,072 tokens
// (CUDA 13.0, cuDNN 9.19; benchmarks/results/2026-11-30-2xh200-one-gpu.json).
constexpr std::size_t kOverheadBytes = std::size_t{16} << 20;

// What a process's context takes of the GPU: what an H200 with driver 580.159 and no other program had
// not free right after the context was made, 552,402,944 of 150,109,880,320 bytes.
constexpr std::size_t kContextBytes = std::size_t{527} << 20;

// A process that is given a piece of this one's memory maps the whole that the driver took it from, once
// (CUDA IPC): two pieces of one such whole could not be given. This is what the driver takes at least.
constexpr std::size_t kPieceBytes = std::size_t{2} << 20;

Device look_for_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  check_gpu_search({driver, runtime, status == cudaErrorInsufficientDriver, count,
                    status == cudaSuccess ? "" : cudaGetErrorString(status)});
  int index = 0;
  expect_success(cudaGetDevice(&index), "looking for the GPU");
  cudaDeviceProp properties;
  expect_success(cudaGetDeviceProperties(&properties, index), "looking for the GPU");
  Device found;
  found.name = properties.name;
  found.multiprocessors = properties.multiProcessorCount;
  found.capability = 10 * properties.major + properties.minor;
  found.memory = properties.totalGlobalMem;
  check_capability(found.name, properties.major, properties.minor);
  return found;
}

/// What is known of a device's memory wherever it is: of this build's kernels and libraries.
DeviceMemory known_memory() {
  DeviceMemory memory;
  memory.overhead = kOverheadBytes;
  memory.granule = kPieceBytes;
  memory.context = kContextBytes;
  return memory;
}

class DeviceAllocator : public Allocator {
 public:
  std::byte* allocate(std::size_t bytes) override {
    const Device& gpu = device();
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, known_memory().taken_for(bytes));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // this error does not stick
      std::size_t free = 0, total = 0;
      cudaMemGetInfo(&free, &total);
      fail_input(
          "{} bytes of GPU memory were needed and {} of {} are free on {}: choose a smaller micro-batch "
          "or "
          "sequence, or more recomputation (agoq plan shows what takes the memory)",
          bytes, free, total, gpu.name);
    }
    expect_success(status, "allocating GPU memory");
    return static_cast<std::byte*>(memory);
  }
  void release(std::byte* memory, std::size_t) override { cudaFree(memory); }
};

}  // namespace

const Device& device() {
  static const Device found = look_for_device();
  return found;
}

Allocator& CudaBackend::allocator() {
  static DeviceAllocator allocator;
  return allocator;
}

std::optional<DeviceMemory> CudaBackend::device_memory() {
  DeviceMemory memory = known_memory();
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    cudaGetLastError();
    return memory;
  }
  try {
    memory.name = device().name;
  } catch (const Error&) {
    return memory;  // too old to run on, like none at all to a plan; expect_ready says so to a run
  }
  expect_success(cudaMemGetInfo(&memory.free, &memory.total), "asking for the free memory");
  return memory;
}

void CudaBackend::expect_ready() {
  device();
  Libraries& own = libraries();
  own.cublas();
  if (own.deterministic) return;
  const std::string problem = own.attention.problem();
  check_input(problem.empty(), "{}, or run on the plain kernels with run.deterministic = true", problem);
}

std::string CudaBackend::description() const {
  const Device& gpu = device();
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  return fmt::format("cuda, {}, {} multiprocessors, compute capability {}.{}, CUDA {}.{} (driver {}.{})",
                     gpu.name, gpu.multiprocessors, gpu.capability / 10, gpu.capability % 10,
                     runtime / 1000, runtime % 1000 / 10, driver / 1000, driver % 1000 / 10);
}

void CudaBackend::use_device(int index) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    cudaGetLastError();
    device();  // says what is missing
  }
  // Some launchers show each of their processes its own GPU only.
  if (count == 1) return;
  check_input(index < count,
              "this process is number {} on its machine, which has {} GPUs: start one process per GPU "
              "(CUDA_VISIBLE_DEVICES hides GPUs)",
              index, count);
  expect_success(cudaSetDevice(index), "choosing the GPU");
}

Stream CudaBackend::side_stream(int index) {
  while (static_cast<int>(side_streams_.size()) <= index) {
    int least = 0, greatest = 0;
    expect_success(cudaDeviceGetStreamPriorityRange(&least, &greatest), "making a stream");
    // What other ranks wait for goes before what only this one does.
    cudaStream_t stream = nullptr;
    expect_success(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
                   "making a stream");
    side_streams_.push_back({stream});
  }
  return side_streams_[static_cast<std::size_t>(index)];
}

namespace {

cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  expect_success(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  return event;
}

}  // namespace

void CudaBackend::mark(Stream earlier, int number) {
  while (static_cast<int>(marks_.size()) <= number) marks_.push_back(new_event());
  expect_success(cudaEventRecord(static_cast<cudaEvent_t>(marks_[static_cast<std::size_t>(number)]),
                                 stream_of(earlier)),
                 "marking a stream");
}

void CudaBackend::await_mark(int number, Stream later) {
  check(number < static_cast<int>(marks_.size()), "mark {} is awaited and was never made", number);
  expect_success(
      cudaStreamWaitEvent(stream_of(later),
                          static_cast<cudaEvent_t>(marks_[static_cast<std::size_t>(number)]), 0),
      "waiting for a mark of a stream");
}

void CudaBackend::order(Stream earlier, Stream later) {
  if (order_event_ == nullptr) order_event_ = new_event();
  // A wait is for what the event holds when it is queued, so the event can be recorded again.
  const auto event = static_cast<cudaEvent_t>(order_event_);
  expect_success(cudaEventRecord(event, stream_of(earlier)), "ordering streams");
  expect_success(cudaStreamWaitEvent(stream_of(later), event, 0), "ordering streams");
}

double CudaBackend::time(const Context& context, const std::function<void()>& work,
                         const std::function<void()>& wait) {
  if (context.workspace.is_measuring()) {
    work();
    return 0;
  }
  class Event {
   public:
    Event() { expect_success(cudaEventCreate(&handle_), "timing"); }
    ~Event() { cudaEventDestroy(handle_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    cudaEvent_t handle() const { return handle_; }

   private:
    cudaEvent_t handle_ = nullptr;
  };
  const Event begin, end;
  const cudaStream_t stream = stream_of(context.stream);
  expect_success(cudaEventRecord(begin.handle(), stream), "timing");
  work();
  expect_success(cudaEventRecord(end.handle(), stream), "timing");
  if (wait) wait();
  expect_success(cudaEventSynchronize(end.handle()), "an operation that was timed");
  float milliseconds = 0;
  expect_success(cudaEventElapsedTime(&milliseconds, begin.handle(), end.handle()), "timing");
  return 1e-3 * double{milliseconds};
}

}  // namespace agoq::cuda

/// What backend/cuda_backend.cpp looks up in the module.
extern "C" agoq::Backend* agoq_cuda_backend() {
  static agoq::cuda::CudaBackend backend;
  return &backend;
}
