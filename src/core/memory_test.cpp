#include "core/memory.h"

#include <gtest/gtest.h>

namespace agoq {
namespace {

TEST(Arena, HandsOutAlignedPiecesAndGivesThemBackAtTheEndOfAScope) {
  Arena arena("test", host_allocator(), 1024);
  std::byte* first = arena.take(1);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % kArenaAlignment, 0u);
  {
    const Arena::Scope scope(arena);
    EXPECT_EQ(arena.take(256), first + 256);
    EXPECT_EQ(arena.used(), 512u);
  }
  EXPECT_EQ(arena.used(), 256u);
  EXPECT_EQ(arena.high_water(), 512u);
}

TEST(Arena, RefusesMoreThanWasPlannedAndNamesItself) {
  Arena arena("weights", host_allocator(), 512);
  arena.take(512);
  try {
    arena.take(1);
    FAIL() << "an over-full arena handed out memory";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'weights'"), std::string::npos);
    EXPECT_EQ(error.kind(), ErrorKind::kFailure);
  }
}

TEST(Arena, MeasuresWithoutOwningAnything) {
  Arena arena = Arena::measuring("plan");
  EXPECT_TRUE(arena.is_measuring());
  {
    const Arena::Scope scope(arena);
    arena.take(std::size_t{1} << 40);
  }
  arena.take(100);
  EXPECT_EQ(arena.high_water(), std::size_t{1} << 40);
  EXPECT_EQ(arena.used(), 256u);
}

// An operation may ask whether two tensors are the same memory: also where there is none.
TEST(Arena, MeasuringArenasDoNotOverlap) {
  Arena first = Arena::measuring("first");
  Arena second = Arena::measuring("second");
  std::byte* of_first = first.take(1000);
  std::byte* of_second = second.take(1000);
  EXPECT_TRUE(of_first + 1000 <= of_second || of_second + 1000 <= of_first);
}

TEST(Tensor, SlicesRowsAndRefusesAnotherType) {
  float values[6] = {0, 1, 2, 3, 4, 5};
  const Tensor tensor{reinterpret_cast<std::byte*>(values), ElementType::kFp32, Shape{3, 2}};
  EXPECT_EQ(tensor.slice_rows(1, 3).as<float>()[0], 2.0f);
  EXPECT_THROW(tensor.as<Bf16>(), Error);
  EXPECT_THROW(tensor.slice_rows(2, 4), Error);
}

TEST(SmallFloat, EveryFp16AndBf16RoundTripsThroughFp32) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const Fp16 half{static_cast<std::uint16_t>(bits)};
    const Bf16 brain{static_cast<std::uint16_t>(bits)};
    const float from_half = to_float(half);
    const float from_brain = to_float(brain);
    if (from_half == from_half) {
      EXPECT_EQ(to_fp16(from_half).bits, bits);
    }
    if (from_brain == from_brain) {
      EXPECT_EQ(to_bf16(from_brain).bits, bits);
    }
  }
}

TEST(SmallFloat, Fp16RoundsToNearestEven) {
  EXPECT_EQ(to_fp16(1.0f + 0x1p-11f).bits, 0x3C00);  // a tie goes to even
  EXPECT_EQ(to_fp16(1.0f + 0x1.8p-10f).bits, 0x3C02);
  EXPECT_EQ(to_fp16(0x1p-25f).bits, 0);  // half the least subnormal
  EXPECT_EQ(to_fp16(0x1.8p-24f).bits, 2);
  EXPECT_EQ(to_fp16(65519.0f).bits, 0x7BFF);
  EXPECT_EQ(to_fp16(65520.0f).bits, 0x7C00);
}

}  // namespace
}  // namespace agoq
