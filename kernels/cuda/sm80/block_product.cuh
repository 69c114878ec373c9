// A product whose weight is decoded to FP16 by a decoder: vector codes, trellises.
//
// A warp decodes 256 of K by 32 columns at a time as the A operand of m16n8k16. Tokens are FP16 in
// shared memory, in the order of the decoder's fragments; BF16 tokens become FP16 on their way there,
// each times a power of two of its own, so that only elements below 2^-28 of the largest in a part
// lose bits.
//
// Work split: a part is 2048 of K, a block for each of eight warps. A unit is 32 or 64 columns by a
// segment, some parts, by a tile of up to 16 tokens; thread blocks have lists of units. A warp adds
// its blocks of a unit, then the eight warps' sums meet in shared memory, in order. Where columns
// have several segments, these sums go to memory, and the last unit of the columns adds all segments
// in order. Segments depend on the shape and the device alone, so a token's bits do not depend on
// the others.
//
// A decoder has
//   Weight                          what the kernel knows of the weight beside its bytes
//   kFinishes                       whether sums become y; else they stay in ProductParams::partials
//   TableBytes(), CopyBytes(w)      of shared memory: tables of a thread block; a warp's copy
//   FillTable(table)                the block synchronises afterwards
//   Copy(w, records, params, block, group, to)  begins to copy a block of 32 columns, for one warp
//   StoreChunk<kEights>(tokens, token, block, v)  stores a lane's eight elements of a token
//   Add<kEights>(w, table, copy, tokens, rows, release, sums, scales)  adds a block's products; calls
//                                   release() when it no longer needs the copy; `rows` of K there are
// Device code, and the host's choices.
#pragma once

#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/grouped.h"
#include "kernels/cuda/common/mma.cuh"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/store.cuh"
#include "kernels/cuda/core/counters.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/registry.h"

namespace awqd::cuda {
namespace {

constexpr int kBlockRows = 256;
constexpr int kPartBlocks = 8;  // a warp for each
constexpr int kPartRows = kPartBlocks * kBlockRows;
constexpr int kGroupThreads = 32 * kPartBlocks;  // of warps that have the same columns
constexpr int kWarpTiles = 2;                    // of 16 columns
constexpr int kGroupColumns = 16 * kWarpTiles;
constexpr int kMostGroups = 2;
constexpr int kMostColumns = kMostGroups * kGroupColumns;  // of a unit; N is padded to them
constexpr int kEight = 8;                                  // tokens of a matrix instruction
// Tokens of a launch, whose partial sums are in memory at a time.
constexpr int64_t kTokensOfLaunch = 256;

// The parameters that all decoders share.
struct CommonParams {
  // [count], or null: one for every tile of rows of `whole`.
  const GroupedTile* tiles;
  GroupedTile whole;
  int count;
  const void* x;
  bool bf16;
  int64_t x_stride;
  const float* x_scale;  // null: 1
  void* y;
  DType y_type;
  int64_t n, k;
  int column_units;      // units beside each other
  int parts;             // of K
  int parts_of_segment;  // the last segment may have fewer
  int segments;
  int kept;  // parts of x that shared memory holds
  // Where there are several segments: [segments, rows of whole, n], and words that are zero, one for
  // each tile and column unit.
  float* partials;
  uint32_t* counters;

  __host__ __device__ int blocks() const {
    return static_cast<int>((k + kBlockRows - 1) / kBlockRows);
  }
};

template <class Decoder>
struct ProductParams : CommonParams {
  typename Decoder::Weight weight;
};

// A part of a unit.
struct Step {
  int part, end;  // counted from row 0 of K; the end of the segment
  int tile, segment, columns;
};

// ---- the list of a block ------------------------------------------------------------------------

// Units are numbered by columns first, then segments, then tiles. Of a dense product a block has
// units that follow each other, so its tokens stay in shared memory. Tiles of experts may be empty,
// so blocks take units in turn.
class Units {
 public:
  __device__ __forceinline__ explicit Units(const CommonParams& p) : p_(p) {
    const int all = p.count * p.segments * p.column_units, blocks = gridDim.x;
    const bool grouped = p.tiles != nullptr;
    step_ = grouped ? blocks : 1;
    next_ = grouped ? blockIdx.x : static_cast<int>(int64_t{all} * blockIdx.x / blocks);
    end_ = grouped ? all : static_cast<int>(int64_t{all} * (blockIdx.x + 1) / blocks);
  }

  // Goes to the first part of the next unit; false: there is none.
  __device__ __forceinline__ bool Next(Step* at) {
    for (; next_ < end_; next_ += step_) {
      const int rest = next_ / p_.column_units;
      at->columns = next_ - rest * p_.column_units;
      at->tile = rest / p_.segments;
      at->segment = rest - at->tile * p_.segments;
      at->part = at->segment * p_.parts_of_segment;
      at->end = min(at->part + p_.parts_of_segment, p_.parts);
      if (p_.tiles != nullptr && p_.tiles[at->tile].first_token >= p_.tiles[at->tile].end_token) {
        continue;
      }
      next_ += step_;
      return true;
    }
    return false;
  }
  __device__ __forceinline__ GroupedTile TileOf(int tile, int tokens) const {
    if (p_.tiles != nullptr) return p_.tiles[tile];
    GroupedTile out = p_.whole;
    out.first_token = tile * tokens;
    return out;
  }

 private:
  const CommonParams& p_;
  int next_, end_, step_;
};

// ---- shared memory ------------------------------------------------------------------------------

// The decoder's table; for each warp its copy; the sums of a unit; the tokens of each part that is
// kept; the factors of its tokens.
template <int kEights>
struct Memory {
  static constexpr int kTokens = kEight * kEights;
  static constexpr int kTokensBytes = kTokens * kPartRows * 2;

  int groups, table_bytes, copy_bytes;

  __host__ __device__ int Sums() const { return table_bytes + groups * kPartBlocks * copy_bytes; }
  // The padding keeps the lanes that store at a time in banks of their own.
  __host__ __device__ int SumsStride() const { return groups * kGroupColumns + 4; }
  __host__ __device__ int Tokens() const {
    return Sums() + kPartBlocks * kTokens * SumsStride() * 4;
  }
  __host__ __device__ int Bytes(int kept) const {
    return Tokens() + kept * (kTokensBytes + kTokens * 4);
  }
};

// The larger magnitudes of BF16 pairs, as bits.
__device__ __forceinline__ uint32_t LargerMagnitude(uint32_t most, uint32_t pair) {
  return max(most, max(pair << 16 & 0x7fffffffu, pair & 0x7fff0000u));
}

// A power of two, as a float's bits, that brings the largest magnitude `bits` to FP16's last octave
// but one, or as near as a float does; infinity counts as the largest finite octave.
__device__ __forceinline__ int ShiftOf(uint32_t bits) {
  const int exponent = min(max(static_cast<int>(bits >> 23), 1), 254) - 127;
  return min(14 - exponent, 126);
}
__device__ __forceinline__ float PowerOfTwo(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

__device__ __forceinline__ uint32_t ScaledPair(uint32_t bf16, float factor) {
  return ToFp16x2(__uint_as_float(bf16 << 16) * factor,
                  __uint_as_float(bf16 & 0xffff0000u) * factor);
}

__device__ __forceinline__ uint32_t LargestOfWarp(uint32_t v) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    v = max(v, __shfl_xor_sync(0xffffffffu, v, apart));
  }
  return v;
}

// Where a part of the tokens lies.
struct TokenRows {
  const uint16_t* x;  // row 0 of the part
  int64_t stride;
  int chunks;  // of eight elements along K

  // The lane's chunk of a block: zeros past K.
  __device__ __forceinline__ uint4 Load(int64_t row, int block) const {
    const int chunk = 32 * block + static_cast<int>(threadIdx.x) % 32;
    if (chunk >= chunks) return {};
    return *(reinterpret_cast<const uint4*>(x + row * stride) + chunk);
  }
};

// Fills `tokens` and, of BF16, `factors` with a part of a tile's tokens, one for each warp at a time.
// Places beyond the last token stay as they are: their sums are never stored.
template <class Decoder, int kEights>
__device__ __forceinline__ void FillPart(const TokenRows& rows, bool bf16, const GroupedTile& tile,
                                         uint4* tokens, float* factors) {
  const int count = min(kEight * kEights, tile.end_token - tile.first_token);
  constexpr int kAtATime = 4;  // blocks, whose loads are under way together
  uint4 v[kAtATime];
  for (int token = threadIdx.x / 32; token < count; token += blockDim.x / 32) {
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) v[i] = rows.Load(tile.first_token + token, first + i);
    };
    float factor = 1;
    if (bf16) {
      uint32_t most = 0;
#pragma unroll 1
      for (int first = 0; first < kPartBlocks; first += kAtATime) {
        load(first);
#pragma unroll
        for (const uint4& chunk : v) {
          most = LargerMagnitude(LargerMagnitude(most, chunk.x), chunk.y);
          most = LargerMagnitude(LargerMagnitude(most, chunk.z), chunk.w);
        }
      }
      const int shift = ShiftOf(LargestOfWarp(most));
      factor = PowerOfTwo(shift);
      if (threadIdx.x % 32 == 0) factors[token] = PowerOfTwo(-shift);
    }
#pragma unroll 1
    for (int first = 0; first < kPartBlocks; first += kAtATime) {
      load(first);
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
        if (bf16) {
          v[i] = {ScaledPair(v[i].x, factor), ScaledPair(v[i].y, factor),
                  ScaledPair(v[i].z, factor), ScaledPair(v[i].w, factor)};
        }
        Decoder::template StoreChunk<kEights>(tokens, token, first + i, v[i]);
      }
    }
  }
}

// ---- the product --------------------------------------------------------------------------------

template <class Decoder, int kEights>
class Product {
 public:
  __device__ __forceinline__ Product(const ProductParams<Decoder>& p, uint8_t* shared)
      : p_(p),
        units_(p),
        memory_{static_cast<int>(blockDim.x) / kGroupThreads, Decoder::TableBytes(),
                Decoder::CopyBytes(p.weight)},
        shared_(shared),
        block_(threadIdx.x / 32 % kPartBlocks),
        group_(threadIdx.x / kGroupThreads) {}

  __device__ __forceinline__ void Run() {
    Step at;
    if (p_.tiles != nullptr) WaitForEarlierKernels();
    if (!units_.Next(&at)) return;
    GroupedTile tile = units_.TileOf(at.tile, kTokens);
    CopyBlock(tile, at);
    Decoder::FillTable(shared_);
    if (p_.tiles == nullptr) WaitForEarlierKernels();
    for (bool more = true; more;) {
      const Step unit = at;
      const GroupedTile tile_of_unit = tile;
      float sums[kWarpTiles][kEights][4] = {};
      for (int part = unit.part; part < unit.end; ++part) {
        const bool fills = FillTokens(tile_of_unit, unit, part);
        if (fills) {
          WaitGroup<0>();
          __syncthreads();
        } else {
          WaitGroup<0>();
          __syncwarp();
        }
        const int slot = HasSegment() ? part - unit.part : 0;
        const auto release = [&] {
          __syncwarp();
          if (++at.part == at.end) {
            more = units_.Next(&at);
            if (more && at.tile != unit.tile) tile = units_.TileOf(at.tile, kTokens);
          }
          if (more) CopyBlock(tile, at);
        };
        const int block = part * kPartBlocks + block_;
        if (block >= p_.blocks()) {
          release();
          continue;
        }
        float products[kWarpTiles][kEights][4] = {};
        float scales[kWarpTiles][2];
        Decoder::template Add<kEights>(
            p_.weight, shared_, copy(), TokensOf(slot) + block_ * kBlockRows / 8 * kTokens,
            static_cast<int>(min(int64_t{kBlockRows}, p_.k - int64_t{block} * kBlockRows)), release,
            products, scales);
        AddScaled(products, scales, slot, sums);
      }
      __syncthreads();  // the sums of the unit before have been read
      StoreSums(sums);
      __syncthreads();
      Finish(unit, tile_of_unit);
    }
  }

 private:
  using M = Memory<kEights>;
  static constexpr int kTokens = M::kTokens;

  __device__ __forceinline__ uint8_t* copy() {
    return shared_ + memory_.table_bytes + threadIdx.x / 32 * memory_.copy_bytes;
  }
  __device__ __forceinline__ float* sums_of_warps() {
    return reinterpret_cast<float*>(shared_ + memory_.Sums());
  }
  // Shared memory has all parts of a segment, or one at a time.
  __device__ __forceinline__ bool HasSegment() const { return p_.parts_of_segment <= p_.kept; }
  __device__ __forceinline__ uint4* TokensOf(int slot) {
    return reinterpret_cast<uint4*>(shared_ + memory_.Tokens() + slot * M::kTokensBytes);
  }
  __device__ __forceinline__ float* FactorsOf(int slot) {
    return reinterpret_cast<float*>(shared_ + memory_.Tokens() + p_.kept * M::kTokensBytes) +
           slot * kTokens;
  }

  // Begins to copy this warp's block of a step.
  __device__ __forceinline__ void CopyBlock(const GroupedTile& tile, const Step& at) {
    const int block = at.part * kPartBlocks + block_;
    if (block < p_.blocks()) {
      Decoder::Copy(p_.weight, tile.records, p_, block, at.columns * memory_.groups + group_,
                    SharedAddress(copy()));
    }
    CommitGroup();
  }

  // Fills shared memory with the tokens of a part, unless they are there. True: it did, and the
  // block has to wait.
  __device__ __forceinline__ bool FillTokens(const GroupedTile& tile, const Step& unit, int part) {
    const bool whole = HasSegment();
    const int wanted = whole ? unit.tile * p_.segments + unit.segment : unit.tile * p_.parts + part;
    if (wanted == filled_) return false;
    filled_ = wanted;
    __syncthreads();  // the tokens that are there have been read
    const int first = whole ? unit.part : part, end = whole ? unit.end : part + 1;
    for (int i = first; i < end; ++i) {
      const int64_t first_row = int64_t{i} * kPartRows;
      const TokenRows rows = {static_cast<const uint16_t*>(p_.x) + first_row, p_.x_stride,
                              static_cast<int>(min(int64_t{kPartRows}, p_.k - first_row)) / 8};
      FillPart<Decoder, kEights>(rows, p_.bf16, tile, TokensOf(i - first), FactorsOf(i - first));
    }
    return true;
  }

  // sums += products of a block times what they lack: the scale of the column and, of BF16, the
  // factor of the token.
  __device__ __forceinline__ void AddScaled(const float (&products)[kWarpTiles][kEights][4],
                                            const float (&scales)[kWarpTiles][2], int slot,
                                            float (&sums)[kWarpTiles][kEights][4]) {
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      float of_tokens[2] = {1, 1};
      if (p_.bf16) {
        const float* const from = FactorsOf(slot) + e * kEight + threadIdx.x % 4 * 2;
        of_tokens[0] = from[0], of_tokens[1] = from[1];
      }
#pragma unroll
      for (int i = 0; i < kWarpTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[i][e][j] =
              __fmaf_rn(products[i][e][j], scales[i][j / 2] * of_tokens[j % 2], sums[i][e][j]);
        }
      }
    }
  }

  // This warp's sums, to shared memory.
  __device__ __forceinline__ void StoreSums(const float (&sums)[kWarpTiles][kEights][4]) {
    const int lane = threadIdx.x % 32, stride = memory_.SumsStride();
    float* const to = sums_of_warps() + (block_ * kTokens + lane % 4 * 2) * stride +
                      group_ * kGroupColumns + lane / 4;
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          to[(e * kEight + j % 2) * stride + i * 16 + j / 2 * 8] = sums[i][e][j];
        }
      }
    }
  }

  // Calls fn(first of four columns, token, sums) for the thread's share of a unit.
  template <class Fn>
  __device__ __forceinline__ void ForSums(const GroupedTile& tile, Fn fn) {
    const int fours = memory_.groups * kGroupColumns / 4, stride = memory_.SumsStride();
    const int tokens = min(kTokens, tile.end_token - tile.first_token);
    for (int i = threadIdx.x; i < fours * tokens; i += blockDim.x) {
      const int token = i / fours, column = i % fours * 4;
      const float* from = sums_of_warps() + token * stride + column;
      float4 sum = {};
#pragma unroll
      for (int block = 0; block < kPartBlocks; ++block, from += kTokens * stride) {
        const float4 more = *reinterpret_cast<const float4*>(from);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      fn(column, token, sum);
    }
  }

  // Whether this unit is the last of its columns whose sums are in memory. All threads call it.
  __device__ __forceinline__ bool IsLast(const Step& unit) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t* const counter = p_.counters + unit.tile * p_.column_units + unit.columns;
      __threadfence();
      last = atomicAdd(counter, 1) + 1 == static_cast<uint32_t>(p_.segments);
      if (last) *counter = 0;
      __threadfence();
    }
    __syncthreads();
    return last;
  }

  __device__ __forceinline__ void Finish(const Step& unit, const GroupedTile& tile) {
    const int64_t first = int64_t{unit.columns} * memory_.groups * kGroupColumns;
    if (Decoder::kFinishes && p_.segments == 1) {
      ForSums(tile, [&](int column, int token, const float4& sum) {
        Store(tile, tile.first_token + token, first + column, sum);
      });
      return;
    }
    float* const mine = p_.partials + unit.segment * SegmentStride();
    ForSums(tile, [&](int column, int token, const float4& sum) {
      const int64_t row = tile.first_token + token, col = first + column;
      if (col >= p_.n) return;
      *reinterpret_cast<float4*>(mine + row * Columns() + col) = sum;
    });
    if (!Decoder::kFinishes || !IsLast(unit)) return;
    const int fours = memory_.groups * kGroupColumns / 4;
    const int tokens = min(kTokens, tile.end_token - tile.first_token);
    for (int i = threadIdx.x; i < fours * tokens; i += blockDim.x) {
      const int64_t row = tile.first_token + i / fours, col = first + i % fours * 4;
      if (col >= p_.n) continue;
      float4 sum = {};
      for (int segment = 0; segment < p_.segments; ++segment) {
        const float4 more = __ldcg(reinterpret_cast<const float4*>(
            p_.partials + segment * SegmentStride() + row * Columns() + col));
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      Store(tile, row, col, sum);
    }
  }

  // Strides of the partials.
  __device__ __forceinline__ int64_t Columns() const { return (p_.n + 3) / 4 * 4; }
  __device__ __forceinline__ int64_t SegmentStride() const {
    return p_.whole.end_token * Columns();
  }

  __device__ __forceinline__ void Store(const GroupedTile& tile, int64_t row, int64_t col,
                                        const float4& sum) {
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
    const float x_scale = p_.x_scale == nullptr ? 1 : p_.x_scale[row];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i >= p_.n) return;
      float out = sums[i];
      if (tile.outer != nullptr) out *= tile.outer[col + i];
      if (p_.x_scale != nullptr) out *= x_scale;
      if (tile.bias != nullptr) out += tile.bias[col + i];
      StoreAs(p_.y_type, p_.y, (tile.y_shift + row) * p_.n + col + i, out);
    }
  }

  const ProductParams<Decoder>& p_;
  Units units_;
  const M memory_;
  uint8_t* const shared_;
  const int block_;  // of a part, which this warp has
  const int group_;  // of columns
  int filled_ = -1;  // what tokens shared memory holds
};

template <class Decoder, int kEights>
__global__ __launch_bounds__(kMostGroups* kGroupThreads, 1) void BlockProductKernel(
    const __grid_constant__ ProductParams<Decoder> p) {
  extern __shared__ __align__(16) uint8_t shared[];
  LaunchDependents();
  Product<Decoder, kEights>(p, shared).Run();
}

// ---- the host's choices -------------------------------------------------------------------------

// Shared memory that a block may have: an architecture's amount, less what the system takes and the
// static part.
inline int SharedLimit(const DeviceInfo& device) {
  const int kilobytes = device.arch >= 90 ? 227 : device.arch == 80 ? 163 : 99;
  return (kilobytes - 1) * 1024;
}

// How a product is cut.
struct BlockPlan {
  int eights = 1;  // tokens of a tile, over eight
  int groups = kMostGroups;
  int kept = 1;
  int parts = 1, segments = 1;
  int table_bytes = 0, copy_bytes = 0;

  int Bytes() const {
    return eights == 1 ? Memory<1>{groups, table_bytes, copy_bytes}.Bytes(kept)
                       : Memory<2>{groups, table_bytes, copy_bytes}.Bytes(kept);
  }
  int Tokens() const { return kEight * eights; }
};

// How many parts a segment has, so that the blocks of a product of few tokens end together.
inline int PartsOfSegment(const WeightShape& shape, const DeviceInfo& device) {
  const int64_t columns = CeilDiv(shape.n, int64_t{kMostColumns});
  const auto parts = static_cast<int>(CeilDiv(shape.k, int64_t{kPartRows}));
  int best = parts;
  double least = 0;
  for (int of_segment = parts; of_segment > 0; --of_segment) {
    const int64_t units = columns * CeilDiv(parts, of_segment);
    // The end of a unit takes about a quarter of a part, and with sums in memory half of one.
    const double cost = static_cast<double>(CeilDiv(units, int64_t{device.sm_count})) *
                        (of_segment + (of_segment < parts ? 0.5 : 0.25));
    if (of_segment == parts || cost < least) best = of_segment, least = cost;
  }
  return best;
}

// Segments of a product whose sums meet in memory: 1 where counters would not do for all columns.
inline int SegmentsOf(const WeightShape& shape, const DeviceInfo& device) {
  const auto parts = static_cast<int>(CeilDiv(shape.k, int64_t{kPartRows}));
  const int64_t units = kTokensOfLaunch / kEight * CeilDiv(shape.n, int64_t{kGroupColumns});
  return units > kStreamCounters ? 1
                                 : static_cast<int>(CeilDiv(parts, PartsOfSegment(shape, device)));
}

// Bytes of CommonParams::partials for m tokens.
inline int64_t PartialsBytes(const WeightShape& shape, int segments, int64_t m) {
  const int64_t columns = CeilDiv(shape.n, int64_t{4}) * 4;
  return segments * std::min(m, kTokensOfLaunch) * columns * int64_t{sizeof(float)};
}

// The widest units and the largest tiles of tokens that fit, and as many parts of x beside them.
inline BlockPlan PlanBlocks(const WeightShape& shape, const DeviceInfo& device, int64_t rows,
                            int segments, int table_bytes, int copy_bytes) {
  const int limit = SharedLimit(device);
  BlockPlan plan = {.eights = rows <= kEight ? 1 : 2,
                    .parts = static_cast<int>(CeilDiv(shape.k, int64_t{kPartRows})),
                    .segments = segments,
                    .table_bytes = table_bytes,
                    .copy_bytes = copy_bytes};
  if (plan.Bytes() > limit) plan.eights = 1;
  if (plan.Bytes() > limit) plan.groups = 1;
  while (plan.kept < CeilDiv(plan.parts, plan.segments)) {
    BlockPlan more = plan;
    ++more.kept;
    if (more.Bytes() > limit) break;
    plan = more;
  }
  return plan;
}

// The parameters of rows [first, first + rows) of a product. Args: MatmulArgs or GroupedArgs.
template <typename Args>
CommonParams ParamsOfRows(const Args& args, const WeightShape& shape, const BlockPlan& plan,
                          int64_t first) {
  const int64_t stride = args.x_stride == 0 ? args.x.cols : args.x_stride;
  return {.x = static_cast<const char*>(args.x.data) + first * stride * SizeOf(args.x.dtype),
          .bf16 = args.x.dtype == DType::kBf16,
          .x_stride = stride,
          .x_scale = args.x_scale == nullptr ? nullptr : args.x_scale + first,
          .y = static_cast<char*>(args.y.data) + first * args.y.cols * SizeOf(args.y.dtype),
          .y_type = args.y.dtype,
          .n = shape.n,
          .k = shape.k,
          .column_units =
              static_cast<int>(CeilDiv(shape.n, int64_t{kMostColumns})) * kMostGroups / plan.groups,
          .parts = plan.parts,
          .parts_of_segment = static_cast<int>(CeilDiv(plan.parts, plan.segments)),
          .segments = plan.segments,
          .kept = plan.kept};
}

template <class Decoder>
absl::Status LaunchBlocks(const ProductParams<Decoder>& p, const BlockPlan& plan,
                          const DeviceInfo& device, absl::string_view name, StreamView stream) {
  const int64_t units = int64_t{p.count} * p.segments * p.column_units;
  const LaunchConfig config{
      .grid = static_cast<unsigned>(std::min<int64_t>(units, device.sm_count)),
      .block = static_cast<unsigned>(plan.groups * kGroupThreads),
      .shared_bytes = plan.Bytes(),
      .stream = stream,
      .attributes = OverlappedLaunch(device)};
  return plan.eights == 1 ? Launch<BlockProductKernel<Decoder, 1>>(name, config, p)
                          : Launch<BlockProductKernel<Decoder, 2>>(name, config, p);
}

}  // namespace
}  // namespace awqd::cuda
