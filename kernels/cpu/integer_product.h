// Products of activations as integers (bodies/bodies.h): which product suits a weight, the memory
// of the tokens, and how the work is split.
#pragma once

#include <cstdint>

#include "kernels/cpu/rows.h"

namespace awqd::cpu {

// Whether a weight has codes of 4 or 8 bits, and groups of whole blocks of 128 rows, or one: what
// INT16 activations are multiplied by.
bool SuitsInt16(const K16Weight& weight);

// The most tokens of INT8 for which a product of bytes is the one to take: 0 where it does not take
// the weight's codes, groups or scales. Above, the next of IntegerProducts is faster, and has the
// same bits.
int64_t MaxInt8Tokens(const K16Weight& weight, const IntegerProduct& product);

// How a product is split into tasks of some tiles and some tokens.
struct TaskSplit {
  int64_t tiles_per_task = 1;
  int64_t tile_tasks = 1;
  int64_t row_tasks = 1;
};
// Few tokens. Products of at most `single` multiplications are one task, because waking another
// thread takes as long as it saves. Tasks have at most `max_rows` tokens.
TaskSplit SplitColumns(const K16Weight& weight, int64_t rows, int64_t threads, int64_t single,
                       int64_t max_rows);
// Whole panels, each task long enough that what comes next is fetched meanwhile. Products of at
// most `single` multiplications are one task.
TaskSplit SplitPanels(const K16Weight& weight, int64_t rows, int64_t threads, int64_t single);

// Some tokens as integers, and the scratch of the threads that multiply them.
class IntegerActivations {
 public:
  // The memory for `rows` tokens, `scratch_bytes` a thread: a multiple of 64 bytes.
  static int64_t Bytes(const K16Weight& weight, const IntegerProduct& product, int64_t rows,
                       int64_t threads, int64_t scratch_bytes);

  // `memory`: Bytes, aligned to 64. All must outlive this.
  IntegerActivations(const K16Weight& weight, const IntegerProduct& product, int64_t rows,
                     int64_t scratch_bytes, void* memory, CpuDevice& device);

  // Converts tokens [begin, begin + count) of x, at most `rows`, which become tokens 0 to count -
  // 1.
  void Convert(const ConstMatrixView& x, int64_t begin, int64_t count);

  // act(first, count, held) for neighbours of the `count` converted tokens that INT16 holds well,
  // and that it does not.
  template <typename Act>
  void ForNeighbours(int64_t count, Act act) const {
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
      while (end < count && held_[end] == held_[begin]) ++end;
      act(begin, end - begin, held_[begin]);
    }
  }

  // A task of all of y for `count` converted tokens from `first` on. `y`: row 0 is that of token
  // `first`.
  IntegerTask Task(int64_t first, int64_t count, const MatrixView& y) const;
  // Runs `function` on the threads, each with some tiles and tokens of `task`, or with some tiles
  // where tokens are interleaved.
  void Run(decltype(IntegerProduct::product) function, const IntegerTask& task,
           const TaskSplit& split) const;

 private:
  IntegerToken Token(int64_t index) const;
  IntegerTask Interleave(const IntegerTask& task) const;

  const K16Weight& weight_;
  const IntegerProduct& product_;
  CpuDevice& device_;
  const int64_t scratch_bytes_;
  char* scratch_;  // [threads][scratch_bytes_]
  char* q_;
  float* steps_;   // [rows][blocks]
  int32_t* sums_;  // [rows][spans]
  bool* held_;     // [rows]
  char* lanes_;    // the first three, interleaved
};

}  // namespace awqd::cpu
