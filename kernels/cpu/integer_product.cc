// Tiles of the weight are shared out, for up to 96 tokens at a time, whose digits stay in the L2
// cache.
#include "kernels/cpu/integer_product.h"

#include <algorithm>

namespace awqd::cpu {
namespace {

constexpr int64_t kMaxTilesPerTask = 8;
constexpr int64_t kMaxRowsPerTask = 96;
constexpr int64_t kMinRowsPerTask = 12;
// Products of fewer multiplications run on one thread, about 30 us: waking another takes as long
// as it saves, and under load it takes a core from those that serve other requests.
constexpr int64_t kAlone = int64_t{3} << 19;

int64_t ScratchFloats(const K16Weight& w, int64_t rows) {
  return RoundUp(DigitScratchFloats(w.groups, rows), int64_t{16});
}

}  // namespace

bool SuitDigits(const K16Weight& w) {
  return w.code == Code::kInteger && (w.bits == 4 || w.bits == 8) &&
         (w.groups == 1 || w.group_size % kIntegerRows == 0);
}

int64_t Digits::Bytes(const K16Weight& w, int64_t threads, int64_t rows) {
  return StandIns::Bytes(w, rows) + threads * ScratchFloats(w, rows) * 4;
}

Digits::Digits(const K16Weight& weight, CpuDevice& device, void* memory, int64_t rows)
    : weight_(weight),
      device_(device),
      bodies_(*DigitBodiesFor(device.info().isa)),
      tokens_(weight, rows, memory),
      scratch_(
          reinterpret_cast<float*>(static_cast<char*>(memory) + StandIns::Bytes(weight, rows))),
      scratch_floats_(ScratchFloats(weight, rows)) {}

const StandIns& Digits::Make(const ConstMatrixView& x, int64_t begin, int64_t count) {
  tokens_.Make(bodies_.make, x, begin, count, device_);
  return tokens_;
}

void Digits::Multiply(int64_t first, int64_t count, const float* bias, const MatrixView& y) {
  const int64_t threads = device_.info().threads, tiles = weight_.tiles;
  const bool alone = count * weight_.k <= kAlone / std::max<int64_t>(1, weight_.n);
  const int64_t tiles_per_task =
      alone ? tiles : std::clamp<int64_t>(tiles / (threads * 8), 1, kMaxTilesPerTask);
  const int64_t tile_tasks = CeilDiv(tiles, tiles_per_task);
  const int64_t spread =
      std::min(CeilDiv(threads * 4, tile_tasks), CeilDiv(count, kMinRowsPerTask));
  const int64_t row_tasks = alone ? 1 : std::max(CeilDiv(count, kMaxRowsPerTask), spread);
  device_.pool().ParallelFor(tile_tasks * row_tasks, [&](int64_t index, int thread) {
    const int64_t part = index % row_tasks;
    const int64_t begin = count * part / row_tasks;
    const TokenIntegers tokens = tokens_.Of(first + begin);
    const int64_t tile = index / row_tasks * tiles_per_task;
    char* const rows = static_cast<char*>(y.data) + begin * y.cols * SizeOf(y.dtype);
    bodies_.product(weight_, {.values = tokens.values,
                              .steps = tokens.steps,
                              .sums = tokens.sums,
                              .rows = count * (part + 1) / row_tasks - begin,
                              .tile_begin = tile,
                              .tile_end = std::min(tile + tiles_per_task, tiles),
                              .bias = bias,
                              .y = rows,
                              .y_stride = y.cols,
                              .y_type = ElementOf(y.dtype),
                              .scratch = scratch_ + thread * scratch_floats_});
  });
}

}  // namespace awqd::cpu
