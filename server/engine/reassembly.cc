// Copies of blocks and rows, and the sums that end on the host.
#include "server/engine/reassembly.h"

#include <algorithm>
#include <cstring>

#include "absl/functional/function_ref.h"
#include "kernels/activate.h"
#include "kernels/base/half.h"

namespace awqd::engine {
namespace {

// Columns that are summed at a time, so that the sums stay in the first cache.
constexpr int64_t kChunk = 512;
// Sums that a thread takes at a time: some tens of microseconds.
constexpr int64_t kSumsEach = 1 << 15;

// Columns [begin, begin + count) of one v, into `out`.
using LoadTerm = absl::FunctionRef<void(int64_t term, int64_t begin, int64_t count, float* out)>;

void Store(const float* sums, int64_t count, DType dtype, void* y, int64_t at) {
  if (dtype == DType::kFp32) {
    std::memcpy(static_cast<float*>(y) + at, sums, count * sizeof(float));
    return;
  }
  auto* const out = static_cast<uint16_t*>(y) + at;
  if (dtype == DType::kFp16) {
    for (int64_t n = 0; n < count; ++n) out[n] = FloatToHalf(sums[n]);
  } else {
    for (int64_t n = 0; n < count; ++n) out[n] = FloatToBf16(sums[n]);
  }
}

// Some columns of a row of y. As CombineRows has it: a product and a sum, each rounded, and no 0 in
// front, which would turn -0 into +0.
void SumRow(const SumShape& shape, int64_t row, int64_t begin, int64_t count, LoadTerm load,
            void* y) {
  float sums[kChunk], term[kChunk];
  for (int64_t j = 0; j < shape.terms; ++j) {
    const int64_t at = row * shape.terms + j;
    load(at, begin, count, term);
    if (shape.activation != ActivationFunction::kNone) {
      for (int64_t n = 0; n < count; ++n) term[n] = ActivateFloat(shape.activation, term[n]);
    }
    const float weight = shape.weights.empty() ? 1.0f : shape.weights[at];
    if (j == 0) {
      for (int64_t n = 0; n < count; ++n) sums[n] = weight * term[n];
    } else {
      for (int64_t n = 0; n < count; ++n) sums[n] += weight * term[n];
    }
  }
  Store(sums, count, shape.y_dtype, y, row * shape.cols + begin);
}

void SumAll(const SumShape& shape, LoadTerm load, void* y, Crew& crew) {
  if (shape.cols == 0) return;
  const int64_t grain = std::max<int64_t>(1, kSumsEach / (shape.cols * shape.terms));
  crew.Share(shape.count, grain, [&](int64_t row) {
    for (int64_t begin = 0; begin < shape.cols; begin += kChunk) {
      SumRow(shape, row, begin, std::min(kChunk, shape.cols - begin), load, y);
    }
  });
}

const float* Floats(const Payload& payload) {
  return reinterpret_cast<const float*>(payload.data());
}

}  // namespace

int64_t BlocksJoin::Take(size_t part, Payload rows, char* result) {
  const Block& block = blocks_[part];
  char* const to = result + block.row_begin * row_bytes_ + block.offset;
  for (int64_t row = 0; row < block.rows; ++row) {
    std::memcpy(to + row * row_bytes_, rows.data() + row * block.row_bytes, block.row_bytes);
  }
  return block.rows * block.row_bytes;
}

int64_t RowsJoin::Take(size_t part, Payload rows, char* result) {
  const char* from = rows.data();
  for (int32_t place : places_[part]) {
    std::memcpy(result + place * row_bytes_, from, row_bytes_);
    from += row_bytes_;
  }
  return from - rows.data();
}

int64_t ChoicesJoin::Take(size_t part, Payload rows, char* /*result*/) {
  taken_[part] = std::move(rows);
  return 0;
}

void ChoicesJoin::Finish(char* result, Crew& crew) {
  std::vector<const float*> rows(shape_.count * shape_.terms);
  for (size_t part = 0; part < places_.size(); ++part) {
    const float* from = Floats(taken_[part]);
    for (int32_t place : places_[part]) {
      rows[place] = from;
      from += shape_.cols;
    }
  }
  const auto load = [&](int64_t term, int64_t begin, int64_t count, float* out) {
    std::memcpy(out, rows[term] + begin, count * sizeof(float));
  };
  SumAll(shape_, load, result, crew);
  taken_.clear();
}

int64_t PartsJoin::Take(size_t part, Payload rows, char* /*result*/) {
  taken_[part] = std::move(rows);
  return 0;
}

void PartsJoin::Finish(char* result, Crew& crew) {
  if (shape_.y_dtype == DType::kInt32) {
    auto* const sums =
        reinterpret_cast<uint32_t*>(result);  // unsigned: it may wrap, and is defined
    const int64_t count = shape_.count * shape_.terms * shape_.cols;
    for (size_t part = 0; part < taken_.size(); ++part) {
      const auto* const from = reinterpret_cast<const uint32_t*>(taken_[part].data());
      for (int64_t i = 0; i < count; ++i) sums[i] = part == 0 ? from[i] : sums[i] + from[i];
    }
  } else {
    const auto load = [&](int64_t term, int64_t begin, int64_t count, float* out) {
      const int64_t at = term * shape_.cols + begin;
      std::memcpy(out, Floats(taken_[0]) + at, count * sizeof(float));
      for (size_t part = 1; part < taken_.size(); ++part) {
        const float* const from = Floats(taken_[part]) + at;
        for (int64_t n = 0; n < count; ++n) out[n] += from[n];
      }
    };
    SumAll(shape_, load, result, crew);
  }
  taken_.clear();
}

}  // namespace awqd::engine
