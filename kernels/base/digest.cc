// XXH64 as its specification says, and many of it at a time.
#include "kernels/base/digest.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "kernels/base/math.h"
#include "kernels/base/parallel_for.h"

namespace awqd {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kPrime1 = 0x9e3779b185ebca87, kPrime2 = 0xc2b2ae3d27d4eb4f,
                   kPrime3 = 0x165667b19e3779f9, kPrime4 = 0x85ebca77c2b2ae63,
                   kPrime5 = 0x27d4eb2f165667c5;

constexpr int64_t kBlock = int64_t{4} << 20;

template <typename Word>
uint64_t Read(const uint8_t* from) {
  Word out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

uint64_t Round(uint64_t sum, uint64_t word) {
  return std::rotl(sum + word * kPrime2, 31) * kPrime1;
}

}  // namespace

uint64_t Xxh64(const void* data, size_t bytes, uint64_t seed) {
  const auto* at = static_cast<const uint8_t*>(data);
  size_t left = bytes;
  uint64_t out = seed + kPrime5;
  if (left >= 32) {
    uint64_t sums[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; left >= 32; left -= 32, at += 32) {
      for (int i = 0; i < 4; ++i) sums[i] = Round(sums[i], Read<uint64_t>(at + 8 * i));
    }
    out = std::rotl(sums[0], 1) + std::rotl(sums[1], 7) + std::rotl(sums[2], 12) +
          std::rotl(sums[3], 18);
    for (const uint64_t sum : sums) out = (out ^ Round(0, sum)) * kPrime1 + kPrime4;
  }
  out += bytes;
  for (; left >= 8; left -= 8, at += 8) {
    out = std::rotl(out ^ Round(0, Read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    out = std::rotl(out ^ Read<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    left -= 4, at += 4;
  }
  for (; left > 0; --left, ++at) out = std::rotl(out ^ *at * kPrime5, 11) * kPrime1;
  out = (out ^ out >> 33) * kPrime2;
  out = (out ^ out >> 29) * kPrime3;
  return out ^ out >> 32;
}

uint64_t DigestOfWeight(const uint8_t* data, int64_t bytes) {
  const int64_t blocks = CeilDiv(bytes, kBlock);
  std::vector<uint64_t> digests(blocks);
  ForEachPart(blocks, 1, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      digests[i] = Xxh64(data + i * kBlock, std::min(kBlock, bytes - i * kBlock));
    }
  });
  return Xxh64(digests.data(), digests.size() * sizeof(uint64_t));
}

}  // namespace awqd
