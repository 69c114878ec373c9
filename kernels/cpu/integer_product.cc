// Tokens are converted one after the other; then tiles of the weight are shared out, for some
// tokens at a time.
#include "kernels/cpu/integer_product.h"

#include <algorithm>
#include <utility>

namespace awqd::cpu {
namespace {

constexpr int64_t kAlign = 64;
// Elements that are converted in a task, about 10 us of work.
constexpr int64_t kConvertedPerTask = int64_t{1} << 16;
// 64 columns: enough that a task of one token takes microseconds, few enough that threads end
// together.
constexpr int64_t kMaxTilesPerTask = 8;
constexpr int64_t kMinRowsPerTask = 12;
// 255 * 128 * 2^16 < 2^31.
constexpr int64_t kMaxRowsOfGroup = int64_t{1} << 16;

int64_t SpansOf(const K16Weight& w, const IntegerProduct& product) {
  return product.int16 ? w.blocks : w.groups;
}

// The bytes of the arrays that a token has a part of.
struct ArrayBytes {
  int64_t q, steps, sums, held;

  ArrayBytes(const K16Weight& w, const IntegerProduct& product, int64_t rows)
      : q(RoundUp(rows * w.blocks * product.token_bytes, kAlign)),
        steps(product.int16 ? RoundUp(rows * w.blocks * 4, kAlign) : 0),
        sums(RoundUp(rows * SpansOf(w, product) * 4, kAlign)),
        held(RoundUp(rows, kAlign)) {}
};

bool IsSmall(const K16Weight& w, int64_t rows, int64_t single) {
  return rows * w.k <= single / std::max<int64_t>(1, w.n);
}

}  // namespace

bool SuitsInt16(const K16Weight& w) {
  return w.code == Code::kInteger && (w.bits == 4 || w.bits == 8) &&
         (w.groups == 1 || w.group_size % kBlockRows == 0);
}

int64_t MaxInt8ByteTokens(const K16Weight& w, CpuIsa isa) {
  const IntegerProduct& product = IntegersFor(isa).int8_bytes;
  if (product.product == nullptr) return 0;
  const bool bytes = w.code == Code::kInteger && (w.bits == 4 || w.bits == 8);
  const int64_t rows = product.any_groups ? 16 : kBlockRows;
  const bool whole = w.groups == 1 || w.group_size % rows == 0;
  // Without scales, or with integers, sums are exact over all of K.
  const bool one_sum = w.integers && (w.groups > 1 || w.scale_values != nullptr);
  if (!bytes || !whole || one_sum || std::min(w.group_size, w.k) > kMaxRowsOfGroup) return 0;
  return w.bits == 8 ? product.max_tokens_8bit : product.max_tokens;
}

TaskSplit SplitColumns(const K16Weight& w, int64_t rows, int64_t threads, int64_t single,
                       int64_t max_rows) {
  if (IsSmall(w, rows, single)) return {w.tiles, 1, 1};
  TaskSplit split;
  split.tiles_per_task = std::clamp<int64_t>(w.tiles / (threads * 8), 1, kMaxTilesPerTask);
  split.tile_tasks = CeilDiv(w.tiles, split.tiles_per_task);
  const int64_t tasks =
      std::min(CeilDiv(threads * 4, split.tile_tasks), CeilDiv(rows, kMinRowsPerTask));
  split.row_tasks = std::max({int64_t{1}, tasks, CeilDiv(rows, max_rows)});
  return split;
}

TaskSplit SplitPanels(const K16Weight& w, int64_t rows, int64_t threads, int64_t single) {
  if (IsSmall(w, rows, single)) return {w.tiles, 1, 1};
  constexpr int64_t kPanelTiles = 4, kMaxTiles = 32;
  const int64_t tiles =
      std::clamp(RoundUp(w.tiles / (threads * 8), kPanelTiles), kPanelTiles, kMaxTiles);
  return {tiles, CeilDiv(w.tiles, tiles), 1};
}

int64_t IntegerActivations::Bytes(const K16Weight& w, const IntegerProduct& product, int64_t rows,
                                  int64_t threads, int64_t scratch_bytes) {
  const ArrayBytes bytes(w, product, rows);
  return threads * RoundUp(scratch_bytes, kAlign) + bytes.q + bytes.steps + bytes.sums + bytes.held;
}

IntegerActivations::IntegerActivations(const K16Weight& weight, const IntegerProduct& product,
                                       int64_t rows, int64_t scratch_bytes, void* memory,
                                       CpuDevice& device)
    : weight_(weight),
      product_(product),
      device_(device),
      scratch_bytes_(RoundUp(scratch_bytes, kAlign)) {
  const ArrayBytes bytes(weight, product, rows);
  scratch_ = static_cast<char*>(memory);
  q_ = scratch_ + device.info().threads * scratch_bytes_;
  steps_ = reinterpret_cast<float*>(q_ + bytes.q);
  sums_ = reinterpret_cast<int32_t*>(q_ + bytes.q + bytes.steps);
  held_ = reinterpret_cast<bool*>(q_ + bytes.q + bytes.steps + bytes.sums);
}

IntegerToken IntegerActivations::Token(int64_t index) const {
  return {.q = q_ + index * weight_.blocks * product_.token_bytes,
          .sums = sums_ + index * SpansOf(weight_, product_),
          .steps = product_.int16 ? steps_ + index * weight_.blocks : nullptr};
}

void IntegerActivations::Convert(const ConstMatrixView& x, int64_t begin, int64_t count) {
  const Element type = ElementOf(x.dtype);
  const int64_t row_bytes = x.cols * SizeOf(x.dtype);
  const char* const rows = static_cast<const char*>(x.data) + begin * row_bytes;
  device_.pool().ForEachRow(count, x.cols, kConvertedPerTask, [&](int64_t token) {
    held_[token] = product_.prologue(weight_, rows + token * row_bytes, type, Token(token));
  });
}

IntegerTask IntegerActivations::Task(int64_t first, int64_t count, const MatrixView& y) const {
  const IntegerToken token = Token(first);
  IntegerTask task;
  task.q = token.q;
  task.sums = token.sums;
  task.steps = token.steps;
  task.rows = count;
  task.tile_end = weight_.tiles;
  task.y = y.data;
  task.y_stride = y.cols;
  task.y_type = ElementOf(y.dtype);
  return task;
}

void IntegerActivations::Run(decltype(IntegerProduct::product) function, const IntegerTask& all,
                             const TaskSplit& split) const {
  const int64_t token_bytes = weight_.blocks * product_.token_bytes;
  const int64_t spans = SpansOf(weight_, product_);
  const bool four_bytes = all.y_type == Element::kFp32 || all.y_type == Element::kInt32;
  const int64_t row_bytes = all.y_stride * (four_bytes ? 4 : 2);
  device_.pool().ParallelFor(split.tile_tasks * split.row_tasks, [&](int64_t index, int thread) {
    const int64_t part = index % split.row_tasks, first = all.rows * part / split.row_tasks;
    IntegerTask task = all;
    task.rows = all.rows * (part + 1) / split.row_tasks - first;
    task.q = static_cast<const char*>(all.q) + first * token_bytes;
    task.sums = all.sums + first * spans;
    if (all.steps != nullptr) task.steps = all.steps + first * spans;
    if (all.x_scale != nullptr) task.x_scale = all.x_scale + first;
    task.y = static_cast<char*>(all.y) + first * row_bytes;
    task.tile_begin = index / split.row_tasks * split.tiles_per_task;
    task.tile_end = std::min(task.tile_begin + split.tiles_per_task, weight_.tiles);
    task.scratch = scratch_ + thread * scratch_bytes_;
    function(weight_, task);
  });
}

}  // namespace awqd::cpu
