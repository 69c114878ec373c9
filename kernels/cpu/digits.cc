// Tokens become digits one by one; then tiles of the weight are shared out, for up to 96 tokens at
// a time, whose digits stay in the L2 cache.
#include "kernels/cpu/digits.h"

#include <algorithm>
#include <utility>

namespace awqd::cpu {
namespace {

// Elements, about 10 us of work.
constexpr int64_t kMadePerTask = int64_t{1} << 16;
constexpr int64_t kMaxTilesPerTask = 8;
constexpr int64_t kMaxRowsPerTask = 96;
constexpr int64_t kMinRowsPerTask = 12;
// Products of fewer multiplications run on one thread, about 30 us: waking another takes as long
// as it saves, and under load it takes a core from those that serve other requests.
constexpr int64_t kAlone = int64_t{3} << 19;

int64_t Aligned(int64_t bytes) { return RoundUp(bytes, int64_t{64}); }
int64_t DigitsBytes(const K16Weight& w, int64_t rows) { return rows * w.blocks * kDigitBytes; }
int64_t FloatsBytes(const K16Weight& w, int64_t rows) { return Aligned(rows * w.blocks * 4); }
int64_t ScratchFloats(const K16Weight& w, int64_t rows) {
  return Aligned(DigitScratchFloats(w.groups, rows) * 4) / 4;
}

}  // namespace

bool SuitDigits(const K16Weight& w) {
  return w.code == Code::kInteger && (w.bits == 4 || w.bits == 8) &&
         (w.groups == 1 || w.group_size % kDigitRows == 0);
}

int64_t Digits::Bytes(const K16Weight& w, int64_t threads, int64_t rows) {
  return DigitsBytes(w, rows) + 2 * FloatsBytes(w, rows) + threads * ScratchFloats(w, rows) * 4 +
         Aligned(rows);
}

Digits::Digits(const K16Weight& weight, CpuDevice& device, void* memory, int64_t rows)
    : weight_(weight), device_(device), bodies_(*DigitBodiesFor(device.info().isa)) {
  auto* at = static_cast<char*>(memory);
  const auto take = [&at](int64_t bytes) { return std::exchange(at, at + bytes); };
  all_.digits = reinterpret_cast<int8_t*>(take(DigitsBytes(weight, rows)));
  all_.scales = reinterpret_cast<float*>(take(FloatsBytes(weight, rows)));
  all_.sums = reinterpret_cast<float*>(take(FloatsBytes(weight, rows)));
  scratch_floats_ = ScratchFloats(weight, rows);
  scratch_ = reinterpret_cast<float*>(take(device.info().threads * scratch_floats_ * 4));
  made_ = reinterpret_cast<bool*>(at);
}

TokenDigits Digits::Of(int64_t m) const {
  return {.digits = all_.digits + m * weight_.blocks * kDigitBytes,
          .scales = all_.scales + m * weight_.blocks,
          .sums = all_.sums + m * weight_.blocks};
}

void Digits::Make(const ConstMatrixView& x, int64_t begin, int64_t count) {
  const Element type = ElementOf(x.dtype);
  const char* const rows = static_cast<const char*>(x.data) + begin * x.cols * SizeOf(x.dtype);
  device_.pool().ForEachRow(count, x.cols, kMadePerTask, [&](int64_t m) {
    made_[m] = bodies_.make(weight_, rows + m * x.cols * SizeOf(x.dtype), type, Of(m));
  });
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
    const TokenDigits tokens = Of(first + begin);
    const int64_t tile = index / row_tasks * tiles_per_task;
    char* const rows = static_cast<char*>(y.data) + begin * y.cols * SizeOf(y.dtype);
    bodies_.product(weight_, {.digits = tokens.digits,
                              .scales = tokens.scales,
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
