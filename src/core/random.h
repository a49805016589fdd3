// Counter-based random numbers without state: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011), for host and device.
//
// A number is a pure function of a RandomKey and an element index, so it does not depend on
// threads, backends or the order of evaluation.
#pragma once

#include <array>
#include <cstdint>

#include "core/small_float.h"

namespace agoq {

/// What a random number is for. Numbers of different purposes are independent.
enum class RandomPurpose : std::uint32_t {
  kInitialWeight = 1,
  kActivationRounding = 2,
  kGradientRounding = 3,
  kWeightRounding = 4,
  kMomentRounding = 5,
  kDataOrder = 6,
  kSampling = 7,
  kTest = 8,
  kSumRounding = 9,
};

struct RandomKey {
  std::uint64_t seed = 0;
  std::uint32_t step = 0;
  std::uint32_t micro_batch = 0;  // a key without it correlates rounding errors over micro-batches
  RandomPurpose purpose = RandomPurpose::kTest;
  std::uint32_t tensor = 0;  // index of the *global* tensor, the same for every parallel layout

  RandomKey with(RandomPurpose new_purpose, std::uint32_t new_tensor) const {
    RandomKey key = *this;
    key.purpose = new_purpose;
    key.tensor = new_tensor;
    return key;
  }
};

struct RandomWords {
  std::uint32_t word[4];
};

/// The Philox 4x32-10 block function.
AGOQ_HD RandomWords philox(RandomWords counter, std::uint32_t key0, std::uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = static_cast<std::uint64_t>(0xD2511F53u) * counter.word[0];
    const std::uint64_t product1 = static_cast<std::uint64_t>(0xCD9E8D57u) * counter.word[2];
    counter = {{static_cast<std::uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                static_cast<std::uint32_t>(product1),
                static_cast<std::uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<std::uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

/// Step, micro-batch, purpose and tensor folded into a Philox key and half a counter by one more block,
/// so that all of their bits count. The same for every element: loops compute it once.
AGOQ_HD RandomWords mixed_key(const RandomKey& key) {
  return philox({{key.step, key.micro_batch, static_cast<std::uint32_t>(key.purpose), key.tensor}},
                static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32));
}

/// Four words for block `index / 4` of the stream that the mixed key names.
AGOQ_HD RandomWords random_words(const RandomWords& mixed, std::uint64_t block) {
  return philox({{static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                  mixed.word[2], mixed.word[3]}},
                mixed.word[0], mixed.word[1]);
}

AGOQ_HD RandomWords random_words(const RandomKey& key, std::uint64_t block) {
  return random_words(mixed_key(key), block);
}

/// 32 random bits for element `index`.
AGOQ_HD std::uint32_t random_bits(const RandomKey& key, std::uint64_t index) {
  return random_words(key, index / 4).word[index % 4];
}

/// Uniform in [0, 1) in steps of 2^-24, for element `index`.
AGOQ_HD float random_uniform(const RandomKey& key, std::uint64_t index) {
  return static_cast<float>(random_bits(key, index) >> 8) * 0x1p-24f;
}

/// A standard normal number (Box-Muller in double precision), for element `index`. Host only.
double random_normal(const RandomKey& key, std::uint64_t index);

/// Student's t with 4 degrees of freedom: the heavy-tailed test distribution. Host only.
double random_student_t4(const RandomKey& key, std::uint64_t index);

}  // namespace agoq
