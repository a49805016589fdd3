#include "train/peak_memory.h"

#include <gtest/gtest.h>

#include "backend/profiled_backend.h"

namespace agoq {
namespace {

/// A device whose free memory is what the test says.
class DeviceOf : public ProfiledBackend {
 public:
  using ProfiledBackend::ProfiledBackend;
  std::optional<DeviceMemory> device_memory() override {
    return DeviceMemory{.name = "a device", .total = 1000, .free = free};
  }
  std::size_t free = 900;
};

TEST(PeakMemory, IsTheFallOfADevicesFreeMemory) {
  DeviceOf device(backend_of(BackendKind::kCpu));
  const PeakMemory peak(device);
  device.free = 300;
  EXPECT_EQ(peak.bytes(550), 600);
}

TEST(PeakMemory, IsNotKnownWhereAnotherProgramGaveMemoryBack) {
  DeviceOf device(backend_of(BackendKind::kCpu));
  const PeakMemory peak(device);
  device.free = 400;
  EXPECT_EQ(peak.bytes(550), 0);
  device.free = 950;
  EXPECT_EQ(peak.bytes(550), 0);
  EXPECT_EQ(format_peak(0), "not known");
}

}  // namespace
}  // namespace agoq
