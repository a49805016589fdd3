#include "core/host_memory.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <optional>
#include <string>

#include "core/temporary_folder.h"

namespace agoq {
namespace {

/// A machine as its files describe it: 1000 KiB, 600 of them available, and 10 of swap.
class HostMemoryFiles : public testing::Test {
 protected:
  void SetUp() override {
    write("proc/meminfo",
          "MemTotal:       1000 kB\nMemFree:         1 kB\nMemAvailable:    600 kB\n"
          "SwapTotal:       20 kB\nSwapFree:        10 kB\n");
  }
  void write(const std::string& name, const std::string& text) const { folder_.write(name, text); }
  void expect(bool of_group, std::size_t total, std::size_t free) const {
    const std::optional<MemoryLimit> limit = memory_limit(folder_.path());
    ASSERT_TRUE(limit.has_value());
    EXPECT_EQ(limit->of_group, of_group);
    EXPECT_EQ(limit->total, total);
    EXPECT_EQ(limit->free, free);
  }
  TemporaryFolder folder_;
};

TEST_F(HostMemoryFiles, TellsWhatTheMachineHas) {
  const std::optional<HostMemory> host = host_memory(folder_.path());
  ASSERT_TRUE(host.has_value());
  EXPECT_EQ(host->total, 1000 * 1024);
  EXPECT_EQ(host->available, 600 * 1024);
  EXPECT_EQ(host->swap_free, 10 * 1024);
  expect(false, 1000 * 1024, 610 * 1024);
  write("proc/meminfo", "MemTotal: 1000 kB\n");
  EXPECT_FALSE(host_memory(folder_.path()).has_value());
  EXPECT_FALSE(memory_limit(folder_.path()).has_value());
  EXPECT_FALSE(host_memory(folder_.path("nowhere")).has_value());
}

TEST_F(HostMemoryFiles, ThisMachineHasWhatItsKernelSays) {
  const std::optional<HostMemory> host = host_memory();
  if (!host) GTEST_SKIP() << "no /proc/meminfo";
  EXPECT_GT(host->available, 0);
  EXPECT_LE(host->available, host->total);
  EXPECT_LE(memory_limit()->total, host->total);
}

TEST_F(HostMemoryFiles, AControlGroupLimitsIt) {
  write("proc/self/cgroup", "0::/jobs/one\n");
  const std::string group = "sys/fs/cgroup/jobs/one/";
  write(group + "memory.max", "400000\n");
  write(group + "memory.current", "150000\n");
  write(group + "memory.stat",
        "anon 20000\nfile 120000\nactive_file 30000\ninactive_file 49000\nslab_reclaimable 1000\n");
  write(group + "memory.swap.max", "7000\n");
  write(group + "memory.swap.current", "3000\n");
  // Files' pages are given up, and swap is the group's share.
  expect(true, 400000, 400000 - 150000 + 80000 + 4000);
  write(group + "memory.swap.max", "max\n");
  expect(true, 400000, 400000 - 150000 + 80000 + 10 * 1024);
  write(group + "memory.current", "900000\n");
  write(group + "memory.swap.max", "0\n");
  expect(true, 400000, 0);
  write(group + "memory.max", "max\n");
  expect(false, 1000 * 1024, 610 * 1024);
  // One above it.
  write("sys/fs/cgroup/jobs/memory.max", "200000\n");
  write("sys/fs/cgroup/jobs/memory.current", "1000\n");
  expect(true, 200000, 199000 + 10 * 1024);
}

TEST_F(HostMemoryFiles, AControlGroupOfVersion1LimitsIt) {
  // Seen from inside a container, the path is the one outside.
  write("proc/self/cgroup", "11:cpu,cpuacct:/docker/one\n4:memory:/docker/one\n0::/\n");
  const std::string group = "sys/fs/cgroup/memory/";
  write(group + "memory.limit_in_bytes", "300000\n");
  write(group + "memory.usage_in_bytes", "120000\n");
  write(group + "memory.stat",
        "active_file 1\ninactive_file 1\ntotal_active_file 10000\ntotal_inactive_file 20000\n");
  expect(true, 300000, 300000 - 120000 + 30000 + 10 * 1024);
  write(group + "memory.limit_in_bytes", "9223372036854771712\n");
  expect(false, 1000 * 1024, 610 * 1024);
}

}  // namespace
}  // namespace agoq
