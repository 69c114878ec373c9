// One token after the other, shared out where there are enough.
#include "kernels/cpu/stand_ins.h"

#include <utility>

namespace awqd::cpu {
namespace {

// Elements, about 10 us of work.
constexpr int64_t kMadePerTask = int64_t{1} << 16;
constexpr int64_t kAlign = 64;

}  // namespace

int64_t StandIns::Bytes(const Size& size, int64_t rows) {
  return rows * size.value_bytes + RoundUp(rows * size.blocks * 4, kAlign) +
         RoundUp(rows * size.sums * 4, kAlign) + RoundUp(rows, kAlign);
}

StandIns::StandIns(const Size& size, int64_t rows, void* memory) : size_(size) {
  auto* at = static_cast<char*>(memory);
  const auto take = [&at](int64_t bytes) { return std::exchange(at, at + RoundUp(bytes, kAlign)); };
  all_.values = take(rows * size.value_bytes);
  all_.steps = reinterpret_cast<float*>(take(rows * size.blocks * 4));
  all_.sums = reinterpret_cast<float*>(take(rows * size.sums * 4));
  made_ = reinterpret_cast<bool*>(at);
}

void StandIns::Make(MakeFn make, const K16Weight& weight, const ConstMatrixView& x, int64_t begin,
                    int64_t count, CpuDevice& device) {
  const Element type = ElementOf(x.dtype);
  const int64_t row_bytes = x.cols * SizeOf(x.dtype);
  const char* const rows = static_cast<const char*>(x.data) + begin * row_bytes;
  device.pool().ForEachRow(count, x.cols, kMadePerTask, [&](int64_t token) {
    made_[token] = make(weight, rows + token * row_bytes, type, Of(token));
  });
}

TokenIntegers StandIns::Of(int64_t token) const {
  return {.values = static_cast<char*>(all_.values) + token * size_.value_bytes,
          .steps = all_.steps + token * size_.blocks,
          .sums = all_.sums + token * size_.sums};
}

}  // namespace awqd::cpu
