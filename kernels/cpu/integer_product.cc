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
  int64_t q, steps, sums, held, lanes;

  ArrayBytes(const K16Weight& w, const IntegerProduct& product, int64_t rows)
      : q(RoundUp(rows * w.blocks * product.token_bytes, kAlign)),
        steps(product.int16 ? RoundUp(rows * w.blocks * 4, kAlign) : 0),
        sums(RoundUp(rows * SpansOf(w, product) * 4, kAlign)),
        held(RoundUp(rows, kAlign)),
        lanes(product.interleave != nullptr
                  ? RoundUp(rows, kLaneTokens) * (w.blocks * product.token_bytes +
                                                  8 * RoundUp(SpansOf(w, product), kLaneTokens))
                  : 0) {}

  int64_t Total() const { return q + steps + sums + held + lanes; }
};

bool IsSmall(const K16Weight& w, int64_t rows, int64_t single) {
  return rows * w.k <= single / std::max<int64_t>(1, w.n);
}

}  // namespace

bool SuitsInt16(const K16Weight& w) {
  return w.code == Code::kInteger && (w.bits == 4 || w.bits == 8) &&
         (w.groups == 1 || w.group_size % kBlockRows == 0);
}

int64_t MaxInt8Tokens(const K16Weight& w, const IntegerProduct& product) {
  if (product.product == nullptr) return 0;
  const bool bytes = w.code == Code::kInteger && (w.bits == 4 || w.bits == 8);
  const bool whole = w.groups == 1 || w.group_size % product.group_rows == 0;
  // Without scales, or with integers, sums are exact over all of K.
  const bool one_sum = w.integers && (w.groups > 1 || w.scale_values != nullptr);
  if (!bytes || !whole || one_sum || std::min(w.group_size, w.k) > kMaxRowsOfGroup) return 0;
  if (w.bits == 8) return product.max_tokens_8bit;
  // Columns of one group are not folded before their end.
  return w.groups == 1 ? std::max(product.max_tokens, product.max_tokens_8bit) : product.max_tokens;
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
  return threads * RoundUp(scratch_bytes, kAlign) + ArrayBytes(w, product, rows).Total();
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
  lanes_ = q_ + bytes.q + bytes.steps + bytes.sums;
  held_ = reinterpret_cast<bool*>(lanes_ + bytes.lanes);
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

IntegerTask IntegerActivations::Interleave(const IntegerTask& task) const {
  const int64_t spans = SpansOf(weight_, product_), span_words = RoundUp(spans, kLaneTokens);
  const int64_t q_words = weight_.blocks * product_.token_bytes / 4;
  const int64_t rows = RoundUp(task.rows, kLaneTokens);
  auto* const q = reinterpret_cast<uint32_t*>(lanes_);
  uint32_t* const sums = q + rows * q_words;
  uint32_t* const steps = sums + rows * span_words;
  device_.pool().ParallelFor(rows / kLaneTokens, [&](int64_t index, int) {
    const int64_t first = index * kLaneTokens;
    const auto interleave = [&](const void* in, int64_t words, int64_t lane_words, uint32_t* out) {
      product_.interleave(static_cast<const uint32_t*>(in) + first * words,
                          std::min(task.rows - first, kLaneTokens), words,
                          out + first * lane_words);
    };
    interleave(task.q, q_words, q_words, q);
    interleave(task.sums, spans, span_words, sums);
    if (task.steps != nullptr) interleave(task.steps, spans, span_words, steps);
  });
  IntegerTask out = task;
  out.q = q;
  out.sums = reinterpret_cast<const int32_t*>(sums);
  if (task.steps != nullptr) out.steps = reinterpret_cast<const float*>(steps);
  return out;
}

void IntegerActivations::Run(decltype(IntegerProduct::product) function, const IntegerTask& tokens,
                             const TaskSplit& split) const {
  const IntegerTask all = product_.interleave == nullptr ? tokens : Interleave(tokens);
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
