// How the results of a work's parts become the work's own.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/types.h"
#include "server/engine/staging.h"
#include "server/engine/thread_pool.h"

namespace awqd::engine {

// Its calls come from the threads that bring the results; what it is made of does not change.
class Join {
 public:
  virtual ~Join() = default;

  // Part `part` has ended with `rows`. Called once for each part, perhaps at the same time for
  // several. Returns how many bytes it copied to `result`, the memory of the whole.
  virtual int64_t Take(size_t part, Payload rows, char* result) = 0;

  // Every part has ended; the helpers of `crew` are there for work that is long.
  virtual void Finish(char* /*result*/, Crew& /*crew*/) {}
};

// Parts that are blocks of the result.
class BlocksJoin final : public Join {
 public:
  struct Block {
    int64_t row_begin = 0;  // of the result
    int64_t rows = 0;
    int64_t offset = 0;     // in each row of the result, in bytes
    int64_t row_bytes = 0;  // of the part's own rows
  };

  // `row_bytes`: of the result.
  BlocksJoin(int64_t row_bytes, std::vector<Block> blocks)
      : row_bytes_(row_bytes), blocks_(std::move(blocks)) {}
  int64_t Take(size_t part, Payload rows, char* result) override;

 private:
  const int64_t row_bytes_;
  const std::vector<Block> blocks_;
};

// Parts whose rows are rows of the result, in any order.
class RowsJoin final : public Join {
 public:
  // `places[part][i]`: which row of the result row i of the part is.
  RowsJoin(int64_t row_bytes, std::vector<std::vector<int32_t>> places)
      : row_bytes_(row_bytes), places_(std::move(places)) {}
  int64_t Take(size_t part, Payload rows, char* result) override;

 private:
  const int64_t row_bytes_;
  const std::vector<std::vector<int32_t>> places_;
};

// What is done with sums of 32 bits, FP32 or INT32:
//
//   y[i, n] = round(sum over j of weights[i * terms + j] * act(v[i * terms + j, n]))
//
// in the order of j, with the bits of CombineRows (kernels/steps.h).
struct SumShape {
  int64_t count = 0;  // rows of y
  int64_t cols = 0;
  int64_t terms = 1;
  std::vector<float> weights;  // [count * terms], or empty: all are 1
  ActivationFunction activation = ActivationFunction::kNone;
  DType y_dtype = DType::kFp16;  // INT32: v is, and nothing is done with it
};

// Parts whose rows are the v of a SumShape: each is a row of one part, which is where a token's
// choice was computed.
class ChoicesJoin final : public Join {
 public:
  // `places[part][i]`: which v row i of the part is.
  ChoicesJoin(SumShape shape, std::vector<std::vector<int32_t>> places)
      : shape_(std::move(shape)), places_(std::move(places)), taken_(places_.size()) {}
  int64_t Take(size_t part, Payload rows, char* result) override;
  void Finish(char* result, Crew& crew) override;

 private:
  const SumShape shape_;
  const std::vector<std::vector<int32_t>> places_;
  std::vector<Payload> taken_;
};

// Parts that all have every v of a SumShape: v is their sum, in the order of the parts.
class PartsJoin final : public Join {
 public:
  PartsJoin(SumShape shape, size_t parts) : shape_(std::move(shape)), taken_(parts) {}
  int64_t Take(size_t part, Payload rows, char* result) override;
  void Finish(char* result, Crew& crew) override;

 private:
  const SumShape shape_;
  std::vector<Payload> taken_;
};

}  // namespace awqd::engine
