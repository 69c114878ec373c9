// A consumer group of the persistent product: decodes weights into the tensor cores' operand and
// accumulates. Device code only.
#pragma once

#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/sm90a/persistent.cuh"
#include "kernels/cuda/sm90a/wgmma.cuh"

namespace awqd::cuda {
namespace {

// Four fragments of 16 rows x 16 k, as one lane holds them.
using Operand = uint32_t[4][4];

// What an operand is decoded from: half a record, 64 of K.
template <class Config>
struct Packed {
  uint4 codes;
  LaneMetaBits metas[Config::kFineGroups ? 4 : 1];
};

template <class Config>
__device__ __forceinline__ Packed<Config> ReadHalf(uint32_t record, int half, int metas) {
  const int lane = threadIdx.x % 32, row_tile = threadIdx.x / 32 % 4;
  Packed<Config> out;
  out.codes = LoadShared16(record + (row_tile * 2 + half) * mma16::kUnitBytes + lane * 16);
#pragma unroll
  for (int s = 0; s < (Config::kFineGroups ? 4 : 1); ++s) {
    const int which = Config::kFineGroups ? (half * 4 + s) * metas / 8 : (metas - 1) * half;
    out.metas[s] =
        ReadMeta(record + mma16::kCodesBytes + which * mma16::kMetaBytes, row_tile, lane);
  }
  return out;
}

template <class Math, class Config>
__device__ __forceinline__ void Decode(const Packed<Config>& packed, Operand& out) {
  const uint32_t words[4] = {packed.codes.x, packed.codes.y, packed.codes.z, packed.codes.w};
  typename Math::Meta meta;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (s == 0 || Config::kFineGroups) {
      meta = Math::Expand(packed.metas[Config::kFineGroups ? s : 0]);
    }
    const Pairs pairs = Math::Decode(words[s], meta);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[s][i] = pairs.v[i];
  }
}

template <class Math, class Config>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const PersistentParams& p, const Ring<Config>& ring,
                                      int group)
      : p_(p), ring_(ring), group_(group) {}

  // sums = W^T x over the steps of `piece`. While the tensor cores work on one half of a step, the
  // next is read and, with two operands, decoded.
  __device__ __forceinline__ void Accumulate(const Piece& piece, Sums<Config>& sums) {
    constexpr int kPending = Config::kOperands - 1;
    int add = 0;
    BarrierWait(ring_.Full(at_.slot), at_.parity);
    Packed<Config> packed = ReadHalf<Config>(ring_.Record(at_.slot, group_), 0, p_.metas);
    for (int step = piece.begin; step < piece.end; ++step) {
      const int slot = at_.slot;
      Decode<Math, Config>(packed, operands_[0]);
      Multiply(slot, 0, add, sums);
      packed = ReadHalf<Config>(ring_.Record(slot, group_), 1, p_.metas);
      WgmmaWait<kPending>();
      // All that read the step before is done.
      if (kPending > 0 && step > piece.begin) Release(before_);
      Decode<Math, Config>(packed, operands_[kPending]);
      Multiply(slot, 1, 1, sums);
      at_.Advance();
      if (step + 1 < piece.end) {
        BarrierWait(ring_.Full(at_.slot), at_.parity);
        packed = ReadHalf<Config>(ring_.Record(at_.slot, group_), 0, p_.metas);
      }
      WgmmaWait<kPending>();
      if (kPending == 0) Release(slot);
      add = 1;
      before_ = slot;
    }
    if (kPending == 0) return;
    WgmmaWait<0>();
    Release(before_);
  }

 private:
  __device__ __forceinline__ void Multiply(int slot, int half, int add, Sums<Config>& sums) {
    const uint64_t tokens = TokensDescriptor(ring_.Tokens(slot) + half * Config::kTokens * 128);
    WgmmaArrive();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      Wgmma<Config::kTokens, Math::kBf16>(sums, operands_[half % Config::kOperands][s],
                                          tokens + s * kDescriptorStep, s == 0 ? add : 1);
    }
    WgmmaCommit();
  }

  // Every warp says for itself that it has read a slot, to each block that writes into it.
  __device__ __forceinline__ void Release(int slot) const {
    __syncwarp();
    if (threadIdx.x % 32 < Config::kCluster) BarrierArrive(ring_.Empty(slot), threadIdx.x % 32);
  }

  const PersistentParams& p_;
  const Ring<Config>& ring_;
  const int group_;
  Cursor<Config> at_;
  int before_ = 0;
  Operand operands_[Config::kOperands];
};

}  // namespace
}  // namespace awqd::cuda
