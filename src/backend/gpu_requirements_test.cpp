// The lines about what a GPU run misses: each says what was expected, what came, and what to do.
#include "backend/gpu_requirements.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"

namespace agoq {
namespace {

/// The message of an Error of kind kInput that `run` throws; "accepted" when it throws none.
template <typename Run>
std::string refusal(Run run) {
  try {
    run();
    return "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
}

void expect_line(const std::string& text, const std::vector<std::string>& parts) {
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(GpuRequirements, NameTheDriverAndTheGpu) {
  const auto search = [](const GpuSearch& found) { return refusal([&] { check_gpu_search(found); }); };
  EXPECT_EQ(search({13010, 13000, false, 1, ""}), "accepted");
  // Minor versions are compatible: an older driver of the same major version serves.
  EXPECT_EQ(search({13000, 13010, false, 2, ""}), "accepted");
  expect_line(search({0, 13000, false, 0, "no CUDA-capable device is detected"}),
              {"serves CUDA 13.0", "has none", "run.device=cpu"});
  expect_line(search({12040, 13010, true, 0, "driver version is insufficient"}),
              {"serves CUDA 13.1", "serves CUDA 12.4", "install a newer driver"});
  expect_line(search({13000, 13000, false, 0, "no CUDA-capable device is detected"}),
              {"needs an NVIDIA GPU", "no CUDA-capable device is detected", "CUDA_VISIBLE_DEVICES"});
  expect_line(search({13000, 13000, false, 0, ""}), {"the driver counts 0"});
}

TEST(GpuRequirements, NameTheOldestCapability) {
  const auto capability = [](int major, int minor) {
    return refusal([&] { check_capability("Tesla V100", major, minor); });
  };
  EXPECT_EQ(capability(8, 0), "accepted");
  EXPECT_EQ(capability(12, 0), "accepted");
  expect_line(capability(7, 5), {"Tesla V100", "capability 7.5", "8.0 (Ampere)", "run.device=cpu"});
}

TEST(GpuRequirements, NameTheVersionsOfCublas) {
  const auto cublas = [](LibraryVersion built, LibraryVersion found) {
    return refusal([&] { check_cublas(built, found); });
  };
  EXPECT_EQ(cublas({13, 1}, {13, 0}), "accepted");
  expect_line(cublas({13, 1}, {12, 8}), {"cuBLASLt 13.x", "finds 12.8", "CUDA 13", "LD_LIBRARY_PATH"});
}

TEST(GpuRequirements, NameTheVersionsOfCudnn) {
  EXPECT_EQ(cudnn_problem({9, 19}, {9, 8}, ""), "");
  EXPECT_EQ(cudnn_problem({9, 8}, {9, 19}, ""), "");
  expect_line(cudnn_problem({9, 19}, {9, 7}, ""), {"cuDNN 9.8 or a newer 9.x", "is 9.7", "install"});
  expect_line(cudnn_problem({9, 19}, {10, 0}, ""), {"newer 9.x", "is 10.0"});
  expect_line(cudnn_problem({9, 19}, {}, "libcudnn.so.9: cannot open"),
              {"could not be opened (libcudnn.so.9: cannot open)", "developer.nvidia.com/cudnn"});
}

TEST(GpuRequirements, NameTheLibraryThatTheModuleMisses) {
  const auto finds = [](const std::string& name) { return name == "libcublasLt.so.12"; };
  const std::string absent = ": cannot open shared object file: No such file or directory";
  expect_line(module_problem("/x/libagoq_cuda.so", "libcublasLt.so.13" + absent, finds),
              {"needs libcublasLt.so.13", "finds libcublasLt.so.12, another major version",
               "libraries of CUDA 13", "LD_LIBRARY_PATH"});
  const std::string other = module_problem("/x/libagoq_cuda.so", "libcublas.so.13" + absent, finds);
  expect_line(other, {"needs libcublas.so.13"});
  EXPECT_EQ(other.find("another major version"), std::string::npos) << other;
  expect_line(module_problem("/x/y.so", "libstrange.so" + absent, finds),
              {"needs libstrange.so", "install it"});
  expect_line(module_problem("/x/y.so", "/x/y.so" + absent, finds), {"/x/y.so", "AGOQ_CUDA_MODULE"});
  expect_line(module_problem("/x/y.so", "/x/y.so: invalid ELF header", finds),
              {"/x/y.so", "invalid ELF header", "build it again"});
}

TEST(GpuRequirements, NameTheOperationThatFailed) {
  expect_line(device_failure("rope", "CUDA", "an illegal memory access", false),
              {"rope, or an operation queued before it: CUDA reports 'an illegal memory access'",
               "CUDA_LAUNCH_BLOCKING=1"});
  EXPECT_EQ(device_failure("rope", "CUDA", "an illegal memory access", true),
            "rope: CUDA reports 'an illegal memory access'");
}

TEST(GpuRequirements, TheLoaderFindsWhatIsThere) {
  EXPECT_TRUE(loader_finds("libc.so.6"));
  EXPECT_FALSE(loader_finds("libagoq-that-nobody-has.so.1"));
}

}  // namespace
}  // namespace agoq
