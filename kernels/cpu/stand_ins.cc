// One token after the other, shared out where there are enough.
#include "kernels/cpu/stand_ins.h"

#include <utility>

namespace awqd::cpu {
namespace {

// Elements, about 10 us of work.
constexpr int64_t kMadePerTask = int64_t{1} << 16;
constexpr int64_t kAlign = 64;

// Of steps, and of sums.
int64_t BlockWords(const K16Weight& w, int64_t rows) { return rows * w.blocks * 4; }

}  // namespace

int64_t StandIns::Bytes(const K16Weight& w, int64_t rows) {
  return rows * w.blocks * kIntegerBytes + 2 * RoundUp(BlockWords(w, rows), kAlign) +
         RoundUp(rows, kAlign);
}

StandIns::StandIns(const K16Weight& weight, int64_t rows, void* memory) : weight_(weight) {
  auto* at = static_cast<char*>(memory);
  const auto take = [&at](int64_t bytes) { return std::exchange(at, at + RoundUp(bytes, kAlign)); };
  all_.values = take(rows * weight.blocks * kIntegerBytes);
  all_.steps = reinterpret_cast<float*>(take(BlockWords(weight, rows)));
  all_.sums = reinterpret_cast<int32_t*>(take(BlockWords(weight, rows)));
  made_ = reinterpret_cast<bool*>(at);
}

void StandIns::Make(MakeFn make, const ConstMatrixView& x, int64_t begin, int64_t count,
                    CpuDevice& device) {
  const Element type = ElementOf(x.dtype);
  const int64_t row_bytes = x.cols * SizeOf(x.dtype);
  const char* const rows = static_cast<const char*>(x.data) + begin * row_bytes;
  device.pool().ForEachRow(count, x.cols, kMadePerTask, [&](int64_t token) {
    made_[token] = make(weight_, rows + token * row_bytes, type, Of(token));
  });
}

TokenIntegers StandIns::Of(int64_t token) const {
  const int64_t block = token * weight_.blocks;
  return {.values = static_cast<char*>(all_.values) + block * kIntegerBytes,
          .steps = all_.steps + block,
          .sums = all_.sums + block};
}

}  // namespace awqd::cpu
