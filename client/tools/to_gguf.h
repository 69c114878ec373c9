// A model as a GGUF file: linears in blocks that hold them exactly, or of one type for the others.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/tools/convert.h"
#include "client/tools/diff.h"
#include "client/tools/elements.h"
#include "client/tools/folder_writer.h"
#include "client/tools/gguf_metadata.h"
#include "client/tools/model.h"
#include "client/tools/quantize.h"
#include "kernels/checkpoint/containers/gguf.h"

namespace awqd::tools {

// The name of the file in a folder that is written.
inline constexpr char kGgufFile[] = "model.gguf";
// Whether an output is a file of its own: its name ends with ".gguf".
bool IsGgufName(absl::string_view path);

// Stores rows of K numbers as a type of floats, or Q8_0 or Q4_0, and adds the difference to `loss`,
// which may be null. INVALID_ARGUMENT naming the row, counted from `first`, of a number that the type
// does not hold; `finite`: nor is one that is not finite before, which needs `loss`.
absl::Status StoreAs(const model::GgufType& type, const float* from, int64_t first, int64_t rows,
                     int64_t k, bool finite, uint8_t* to, Difference* loss);

// A tensor of the file.
struct GgufTensor {
  // One linear, or a dense tensor. Several are the experts, in order.
  struct Piece {
    const model::LinearLocation* linear = nullptr;
    const model::TensorLocation* dense = nullptr;
    std::string path;  // of the linear; of a dense tensor its name
  };
  std::string name;
  const model::GgufType* type = nullptr;
  std::vector<int64_t> shape;  // row-major; of pieces without that of the experts
  RowOrder rows;
  std::vector<Piece> pieces;
  bool experts = false;        // one more dimension: pieces
  bool exact = false;          // blocks of a linear's own codes
  std::vector<uint8_t> bytes;  // of a tensor without pieces

  int64_t row_elements() const { return shape.size() < 2 ? 1 : shape.back(); }
  int64_t row_count() const;  // of a piece
  int64_t row_bytes() const { return row_elements() / type->elements * type->bytes; }
  int64_t total_bytes() const;
};

struct GgufOptions {
  std::string dtype;
  std::vector<std::string> leave_out;  // as QuantizeOptions has it
};

// Weights that have other elements than the source's.
struct Replacement {
  std::set<std::string> paths;  // of linears, quantised or dense
  std::function<absl::StatusOr<ReadRows>(const std::string& path)> open;
  std::map<std::string, std::vector<float>> tensors;  // by name; of the source's shape
};

// The content of the file: names, types and shapes, known before anything of it is written.
// `options.dtype` is the type of linears whose elements no block holds exactly: F16, BF16, F32, Q8_0 or
// Q4_0. Of a dense model it is that of every linear and embedding; empty: each as it is. Where it
// is a block type, linears that quantize leaves out stay as they are, and so do those whose K is
// not a multiple of a block. The source outlives the plan. INVALID_ARGUMENT naming a tensor or a
// linear that the file cannot hold, or that llama.cpp has no name for in this architecture.
struct GgufPlan {
  std::vector<GgufTensor> tensors;
  std::string metadata;
  int64_t keys = 0;
  bool known = false;  // llama.cpp loads it
  std::vector<std::string> left_out;
};
absl::StatusOr<GgufPlan> PlanGguf(const Model& source, const GgufOptions& options,
                                  const Replacement& replaced);

// Writes the file, and beside it, but for a file of its own, config.json and what else RewriteFolder
// writes. Fills in the linears and carried tensors of the report. `rounded`, which may be null, gets
// each linear that is rounded, with the difference that this made.
absl::Status WriteGguf(const Model& source, const GgufPlan& plan, const Replacement& replaced,
                       std::vector<QuantizedLinear>* rounded, const Progress& progress,
                       FolderWriter* out, Conversion* report);

// Reads `written` back, and compares every element with the source's as Verify does: exactly; or
// with its one rounding; or, of Q8_0 and Q4_0 that are rounded to, within the error that their
// definitions have.
absl::StatusOr<Verification> VerifyGguf(const Model& source, const GgufPlan& plan,
                                        const std::string& written, const Carried& carried,
                                        const Progress& progress);

}  // namespace awqd::tools
