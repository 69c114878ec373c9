// Tokens are brought into the order of codes; then tiles of the weight are shared out.
#include "kernels/cpu/quads.h"

#include <algorithm>
#include <utility>

namespace awqd::cpu {
namespace {

// Elements, about 10 us of work.
constexpr int64_t kOrderedPerTask = int64_t{1} << 16;
// Products of fewer multiplications run on one thread: waking another takes as long as it saves.
constexpr int64_t kAlone = int64_t{1} << 21;
// Of 255 * 128 * 2^16 < 2^31.
constexpr int64_t kMostRowsOfGroup = int64_t{1} << 16;

int64_t Aligned(int64_t bytes) { return RoundUp(bytes, int64_t{64}); }

// Of one thread: panels, or the factors of a tile.
int64_t ScratchBytes(const K16Weight& w, CpuIsa isa) {
  const int64_t few = 3 * w.groups * 8;
  return Aligned(std::max(IntegerBodiesFor(isa).scaled_scratch_bytes, few * 4));
}

// The tokens of a call, one array after the other.
struct Tokens {
  int8_t* values;
  int32_t* sums;

  static int64_t Bytes(const K16Weight& w, int64_t rows) {
    return Aligned(rows * w.blocks * kIntegerRows) + Aligned(rows * w.groups * 4);
  }

  // `at`: Bytes.
  Tokens(const K16Weight& w, int64_t rows, char* at) {
    const auto take = [&at](int64_t bytes) { return std::exchange(at, at + Aligned(bytes)); };
    values = reinterpret_cast<int8_t*>(take(rows * w.blocks * kIntegerRows));
    sums = reinterpret_cast<int32_t*>(take(rows * w.groups * 4));
  }

  QuadToken Of(const K16Weight& w, int64_t m) const {
    return {.values = values + m * w.blocks * kIntegerRows, .sums = sums + m * w.groups};
  }
};

int64_t TilesPerTask(const K16Weight& w, int64_t rows, int64_t threads) {
  if (rows * w.k <= kAlone / std::max<int64_t>(1, w.n)) return w.tiles;
  return TilesOfPanelTask(w, threads);
}

}  // namespace

int64_t MostTokensOfQuads(const K16Weight& w, CpuIsa isa) {
  const QuadBodies* const bodies = QuadBodiesFor(isa);
  if (bodies == nullptr) return 0;
  const bool bytes = w.code == Code::kInteger && (w.bits == 4 || w.bits == 8);
  const int64_t rows = bodies->any_groups ? 16 : kIntegerRows;
  const bool whole = w.groups == 1 || w.group_size % rows == 0;
  // Without scales, or with integers, sums are exact over all of K.
  const bool one_sum = w.integers && (w.groups > 1 || w.scale_values != nullptr);
  if (!bytes || !whole || one_sum || std::min(w.group_size, w.k) > kMostRowsOfGroup) return 0;
  return w.bits == 8 ? bodies->most_tokens_of_bytes : bodies->most_tokens;
}

int64_t QuadBytes(const K16Weight& w, const DeviceInfo& device, int64_t rows) {
  return Tokens::Bytes(w, rows) + ScratchBytes(w, device.isa) * device.threads;
}

void MultiplyByQuads(const MatmulArgs& args, const K16Weight& w, void* memory) {
  CpuDevice& device = CpuDevice::Of(args.weight->device);
  const QuadBodies& bodies = *QuadBodiesFor(device.info().isa);
  const int64_t rows = args.x.rows, scratch_bytes = ScratchBytes(w, device.info().isa);
  auto* const scratch = static_cast<char*>(memory);
  const Tokens tokens(w, rows, scratch + scratch_bytes * device.info().threads);
  device.pool().ForEachRow(rows, w.k, kOrderedPerTask, [&](int64_t m) {
    bodies.order(w, static_cast<const int8_t*>(args.x.data) + m * w.k, tokens.Of(w, m));
  });
  const int64_t tiles = TilesPerTask(w, rows, device.info().threads);
  device.pool().ParallelFor(CeilDiv(w.tiles, tiles), [&](int64_t task, int thread) {
    bodies.product(w, {.x = tokens.values,
                       .sums = tokens.sums,
                       .x_scale = args.x_scale,
                       .rows = rows,
                       .tile_begin = task * tiles,
                       .tile_end = std::min((task + 1) * tiles, w.tiles),
                       .bias = args.bias,
                       .y = args.y.data,
                       .y_stride = args.y.cols,
                       .y_type = ElementOf(args.y.dtype),
                       .scratch = scratch + thread * scratch_bytes});
  });
}

}  // namespace awqd::cpu
