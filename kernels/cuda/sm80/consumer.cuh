// What a group of warps of the fused product does with its ring: decodes weights and multiplies.
// Device code only.
#pragma once

#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/sm80/ring.cuh"

namespace awqd::cuda {
namespace {

template <class Config>
using Sums = float[Config::kRowTiles][Config::kTokenTiles][4];

// Multiplies what lies in the ring, slot by slot: this warp's fragment row of each record times all
// tokens.
template <class Math, class Config>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Slot<Config>& slot, uint32_t ring) : slot_(slot) {
    const int lane = threadIdx.x % 32, row_tile = GroupThread() / 32;
    codes_ = ring + row_tile * 2 * mma16::kUnitBytes + lane * 16;
    scales_ = ScalesAddress(ring + mma16::kCodesBytes, row_tile, lane);
    zeros_ = ZerosAddress(ring + mma16::kCodesBytes, row_tile, lane);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int chunk = (pair * 4 + lane / 8) ^ (lane % 8);
      tokens_[pair] = ring + slot.tokens() + lane % 8 * Config::kTokenBytes + chunk * 16;
    }
  }

  // sums += of the next slot.
  __device__ __forceinline__ void Accumulate(Sums<Config>& sums) {
#pragma unroll Config::kHalves
    for (int half = 0; half < 2; ++half) AccumulateHalf(half, sums);
    const int next = walk_.Advance(slot_);
    codes_ += next, scales_ += next, zeros_ += next, tokens_[0] += next, tokens_[1] += next;
  }

 private:
  __device__ __forceinline__ typename Math::Meta Meta(int r, int which) const {
    const int offset = r * slot_.record_bytes + which * mma16::kMetaBytes;
    return Math::Expand({LoadShared4(scales_ + offset), LoadShared1(zeros_ + offset)});
  }

  // Half a record of K, 64 rows.
  __device__ __forceinline__ void AccumulateHalf(int half, Sums<Config>& sums) {
    uint4 codes[Config::kRowTiles];
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      codes[r] = LoadShared16(codes_ + r * slot_.record_bytes + half * mma16::kUnitBytes);
      if (Config::kMetas == 2 || (Config::kMetas == 1 && half == 0)) meta_[r] = Meta(r, half);
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      Pairs a[Config::kRowTiles][2];
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) {
        const uint32_t words[2] = {pair == 0 ? codes[r].x : codes[r].z,
                                   pair == 0 ? codes[r].y : codes[r].w};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          if (Config::kFineGroups) {
            meta_[r] = Meta(r, (half * 4 + pair * 2 + s) * slot_.metas() / 8);
          }
          a[r][s] = Math::Decode(words[s], meta_[r]);
        }
      }
#pragma unroll
      for (int j = 0; j < Config::kTokenTiles; ++j) {
        uint32_t b[4];
        LoadMatrices(tokens_[pair] + half * kHalfTokenBytes + j * 8 * Config::kTokenBytes, b);
#pragma unroll
        for (int r = 0; r < Config::kRowTiles; ++r) {
          Math::Mma(sums[r][j], a[r][0], b[0], b[1]);
          Math::Mma(sums[r][j], a[r][1], b[2], b[3]);
        }
      }
    }
  }

  static constexpr int kHalfTokenBytes = Config::kTokenBytes / 2;

  const Slot<Config> slot_;
  Walk<Config> walk_;
  uint32_t codes_;
  uint32_t scales_;
  uint32_t zeros_;
  uint32_t tokens_[2];  // of the first and the second 32 of 64 rows of K
  typename Math::Meta meta_[Config::kRowTiles];
};

}  // namespace
}  // namespace awqd::cuda
