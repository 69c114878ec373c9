// Elements: the numbers W[K, N] of a linear, some rows at a time. ReadAhead reads the next linear.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/tools/model.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/weight.h"

namespace awqd::tools {

// The zero point of a group in a column as a number, however it is stored.
inline float ZeroOf(const HostWeight& weight, int64_t group, int64_t col) {
  return weight.scheme.real_zeros() ? weight.RealZero(group, col)
                                    : static_cast<float>(weight.Zero(group, col));
}

// Rows of a quantised weight by in-feature, each element as WeightValue (kernels/exact.h) has it,
// after the weight's transform and times its factor: of the W that activations are multiplied by as
// they are sent. A transform takes memory for a block of rows. The weight must outlive it. Not
// thread-safe.
class RowReader {
 public:
  explicit RowReader(const HostWeight* weight) : RowReader(weight, 0, weight->n) {}
  // Reads columns [begin, end) alone; `begin` is a multiple of 8.
  RowReader(const HostWeight* weight, int64_t begin, int64_t end);

  // The elements of in-feature `k` in those columns.
  void Read(int64_t k, float* to);
  // Their codes, one to a byte. Not of vector codes.
  void ReadCodes(int64_t k, uint8_t* to) const;

 private:
  int64_t StoredRow(int64_t k) const { return row_of_.empty() ? k : row_of_[k]; }
  void OpenGroup(int64_t group);
  void OpenTrellis(int64_t group);
  // The elements that activations are multiplied by after the transform, without the factor.
  void ReadStored(int64_t k, float* to);
  void MultiplyByOuter(float* to) const;

  const HostWeight* weight_;
  int64_t begin_, count_;        // of the columns
  std::vector<int32_t> row_of_;  // of an in-feature; empty without an order
  int64_t group_ = -1;           // whose zeros and scales the two below are
  std::vector<float> zeros_, scales_;
  std::vector<float> values_;  // of each code; empty for integers
  std::vector<uint8_t> codes_;
  std::vector<DecodedBlock> blocks_;  // of the group, of vector codes
  std::vector<float> trellis_;        // of the group, of a trellis: [16, count_]
  int64_t block_ = -1;                // whose transformed rows are these
  std::vector<float> transformed_;    // [size, count_]
};

// A linear's weight as torch stores it, in its file.
struct DenseWeight {
  int64_t k = 0, n = 0;
  model::TensorLocation tensor;  // [N, K]
  std::vector<float> bias;       // [N], or empty
};

// The weight of a quantised or a dense linear. Move-only. The file of a dense one must outlive it.
class Elements {
 public:
  explicit Elements(HostWeight weight)
      : weight_(std::make_unique<const HostWeight>(std::move(weight))) {}
  explicit Elements(DenseWeight dense) : dense_(std::move(dense)) {}

  int64_t k() const { return weight_ ? weight_->k : dense_.k; }
  int64_t n() const { return weight_ ? weight_->n : dense_.n; }
  // Null for a dense one.
  const HostWeight* weight() const { return weight_.get(); }
  // "w4g128z", or the type of a dense weight.
  std::string scheme() const;
  // [N], or empty.
  const std::vector<float>& bias() const { return weight_ ? weight_->bias : dense_.bias; }
  // Columns [begin, end), `begin` a multiple of 8, as [K, end - begin] by in-feature.
  absl::Status Read(int64_t begin, int64_t end, float* to) const;
  // Columns to be read at a time: some MiB of them.
  int64_t Step() const;

 private:
  std::unique_ptr<const HostWeight> weight_;
  DenseWeight dense_;
};

// All of a linear, valid. RESOURCE_EXHAUSTED before anything is read where it would take more
// memory than is free; other errors are those of Checkpoint::Read and Validate.
absl::StatusOr<HostWeight> ReadWeight(const model::Checkpoint& checkpoint,
                                      const model::LinearLocation& linear);

// RESOURCE_EXHAUSTED where so many rows of so many bytes, which may be in memory three times, would
// take more than is free. A hole in a file takes memory too, once it is read.
absl::Status CheckRoom(absl::string_view what, int64_t rows, int64_t row_bytes);
// Bytes for each in-feature of a dense linear that is read some rows at a time.
inline constexpr int64_t kDenseRowsBytes = 64;

// The quantised linear of that path, else the tensor "<path>.weight", and "<path>.bias"
// where it is as long. NOT_FOUND when there is neither, RESOURCE_EXHAUSTED as above.
absl::StatusOr<Elements> ReadElements(const Model& model, absl::string_view path);

// Rows [begin, end) of a weight [N, K] as FP32. Thread-safe.
using ReadRows = std::function<absl::Status(int64_t begin, int64_t end, float* to)>;
// Those of a tensor of F16, BF16 or F32 [N, K], whose file outlives it.
ReadRows RowsOfTensor(const model::TensorLocation& place, int64_t k);

DType FloatTypeNamed(absl::string_view dtype);

// `value` rounded once to FP16, BF16 or FP32.
float RoundTo(DType type, float value);
// Stores it so, and returns it.
float StoreRounded(float value, DType type, uint8_t* to);

// Stores `count` numbers so; false where one became infinite.
bool StoreFloats(const float* from, int64_t count, DType type, uint8_t* to);

// Calls `each` for two halves of [begin, end), in multiples of `unit` from `begin`, at the same time
// where each has at least `least`. Returns the first error.
absl::Status RunHalves(int64_t begin, int64_t end, int64_t unit, int64_t least,
                       absl::FunctionRef<absl::Status(int64_t begin, int64_t end)> each);

// Not thread-safe. The checkpoint outlives it.
class ReadAhead {
 public:
  // Reads `linears` in that order, one further than it was asked for.
  ReadAhead(const model::Checkpoint& checkpoint, std::vector<const model::LinearLocation*> linears)
      : checkpoint_(checkpoint), linears_(std::move(linears)) {}

  // The next one, valid. Errors are those of ReadWeight. Once for each.
  absl::StatusOr<HostWeight> Next();

 private:
  void Begin();

  const model::Checkpoint& checkpoint_;
  const std::vector<const model::LinearLocation*> linears_;
  size_t begun_ = 0;
  std::future<absl::StatusOr<HostWeight>> next_;
};

}  // namespace awqd::tools
