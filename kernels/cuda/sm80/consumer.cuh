// A consumer, four warps of the fused product: it decodes the weights in its ring and multiplies.
// Device code only.
#pragma once

#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/sm80/ring.cuh"

namespace awqd::cuda {
namespace {

template <class Config>
using Sums = typename Config::Sum[Config::kRowTiles][Config::kTokenTiles][4];

// The addresses at which a thread of a consumer reads in the current slot.
template <class Config>
struct SlotAddresses {
  uint32_t codes;
  uint32_t scales;  // of its two rows
  uint32_t zeros;
  uint32_t tokens[2];  // of the first and the second half of K

  // `ring`: the first slot.
  __device__ __forceinline__ SlotAddresses(const Slot<Config>& slot, uint32_t ring) {
    using Record = typename Config::Record;
    const int lane = threadIdx.x % 32, row_tile = ConsumerThread() / 32;
    const uint32_t metas = ring + Record::kCodesBytes;
    codes = ring + row_tile * 2 * Record::kUnitBytes + LaneCodes<Record::kBits>::LaneOffset(lane);
    scales = ScalesAddress<Record>(metas, row_tile, lane);
    zeros = ZerosAddress<Record::kBits>(metas, row_tile, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = (half * 4 + lane / 8) ^ (lane % 8);
      tokens[half] = ring + slot.tokens() + lane % 8 * Config::kTokenBytes + chunk * 16;
    }
  }

  __device__ __forceinline__ void Advance(int bytes) {
    codes += bytes, scales += bytes, zeros += bytes, tokens[0] += bytes, tokens[1] += bytes;
  }
};

// Multiplies the slots of the ring one by one: this warp's fragment row of each record times all
// tokens.
template <class Math, class Config>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const QMatmulParams& p, const Slot<Config>& slot,
                                      uint32_t ring)
      : slot_(slot), zero_first_(p.zero_first), at_(slot, ring) {
    if constexpr (Record::kBare) {
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) meta_[r] = Math::Expand(BareMeta(p.zero));
    }
  }

  // sums += of the next slot.
  __device__ __forceinline__ void Accumulate(Sums<Config>& sums) {
    if constexpr (kScalesSums) {
      AccumulateGroups(sums);
    } else {
#pragma unroll Config::kHalves
      for (int half = 0; half < 2; ++half) AccumulateHalf(half, sums);
    }
    at_.Advance(walk_.Advance(slot_));
  }

 private:
  using Record = typename Config::Record;
  using Codes = LaneCodes<Record::kBits>;
  static constexpr bool kScalesSums = requires { Math::kScalesSums; };

  __device__ __forceinline__ typename Math::Meta Meta(int r, int which) const {
    const int offset = r * slot_.record_bytes + which * Record::kMetaBytes;
    return Math::Expand(
        LoadMeta<Record>(at_.scales + offset, at_.zeros + offset, zero_first_, /*factor=*/1));
  }

  // sums += those of a record, or of each half where a group is half a record, times its scales.
  __device__ __forceinline__ void AccumulateGroups(Sums<Config>& sums) {
    static_assert(Record::kMetas == 1 || Record::kMetas == 2);
    Sums<Config> group = {};
#pragma unroll Config::kHalves
    for (int half = 0; half < 2; ++half) {
      AccumulateHalf(half, group);
      if (Record::kMetas == 1 && half == 0) continue;
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
        for (int j = 0; j < Config::kTokenTiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sums[r][j][e] += meta_[r].scales[e / 2] * group[r][j][e];
            group[r][j][e] = 0;
          }
        }
      }
    }
  }

  // Half a record of K, 64 rows.
  __device__ __forceinline__ void AccumulateHalf(int half, Sums<Config>& sums) {
    Codes codes[Config::kRowTiles];
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      codes[r].Load(at_.codes + r * slot_.record_bytes + half * Record::kUnitBytes);
      if (Record::kMetas == 2 || (Record::kMetas == 1 && half == 0)) meta_[r] = Meta(r, half);
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      Pairs a[Config::kRowTiles][2];
#pragma unroll
      for (int r = 0; r < Config::kRowTiles; ++r) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          if (Record::kFine) {
            meta_[r] = Meta(r, (half * 4 + pair * 2 + s) * slot_.metas() / 8);
          }
          a[r][s] = Math::Decode(codes[r], pair * 2 + s, meta_[r]);
        }
      }
#pragma unroll
      for (int j = 0; j < Config::kTokenTiles; ++j) {
        uint32_t b[4];
        LoadMatrices(at_.tokens[pair] + half * kHalfTokenBytes + j * 8 * Config::kTokenBytes, b);
#pragma unroll
        for (int r = 0; r < Config::kRowTiles; ++r) {
          Mma<Math::kBf16>(sums[r][j], a[r][0], b[0], b[1]);
          Mma<Math::kBf16>(sums[r][j], a[r][1], b[2], b[3]);
        }
      }
    }
  }

  static constexpr int kHalfTokenBytes = Config::kTokenBytes / 2;

  const Slot<Config> slot_;
  const bool zero_first_;
  Walk<Config> walk_;
  SlotAddresses<Config> at_;
  typename Math::Meta meta_[Config::kRowTiles];
};

}  // namespace
}  // namespace awqd::cuda
