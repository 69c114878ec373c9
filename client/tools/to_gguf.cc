// Plans, writes and reads back a GGUF file.
#include "client/tools/to_gguf.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "client/tools/encode/blocks.h"
#include "client/tools/encode/target.h"
#include "client/tools/rewrite.h"
#include "kernels/base/math.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/experts.h"
#include "kernels/checkpoint/tensor_names.h"

namespace awqd::tools {
namespace {

using Piece = GgufTensor::Piece;

constexpr int64_t kAlignment = 32;        // general.alignment's default
constexpr int64_t kChunkBytes = 4 << 20;  // of FP32 rows that are encoded at a time
constexpr absl::string_view kIntegerTypes[] = {"I8", "I16", "I32", "I64", "F64"};

bool IsBlockType(absl::string_view type) { return type == "Q8_0" || type == "Q4_0"; }

std::vector<uint8_t> RawBytes(absl::Span<const float> values) {
  std::vector<uint8_t> out(values.size() * sizeof(float));
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

int64_t Product(absl::Span<const int64_t> shape) {
  int64_t out = 1;
  for (const int64_t dim : shape) out *= dim;
  return out;
}

// --- The plan ---

class Planner {
 public:
  Planner(const Model& source, const GgufOptions& options, const Replacement& replaced,
          const GgufNames& names)
      : source_(source),
        dtype_(options.dtype),
        leave_out_(options.leave_out),
        replaced_(replaced),
        names_(names) {}

  absl::StatusOr<GgufPlan> Plan() {
    for (const std::string& name : source_.tensors().InOrder()) {
      if (source_.IsPart(name)) {
        for (const auto* linear : source_.LinearsWithCodes(name)) {
          const absl::Status status = AddLinear(*linear);
          if (!status.ok()) return Prefixed(absl::StrCat("linear ", Quoted(linear->path)), status);
        }
      } else {
        AWQD_RETURN_IF_ERROR(AddDense(name));
      }
    }
    if (!names_.rope_factors().empty()) AddMade("rope_freqs.weight", {}, names_.rope_factors());
    AddParts();
    for (const GgufTensor& tensor : plan_.tensors) AWQD_RETURN_IF_ERROR(Check(tensor));
    plan_.metadata = names_.metadata();
    plan_.keys = names_.keys();
    plan_.known = names_.known();
    return std::move(plan_);
  }

 private:
  // Numbers of each piece, one FP32 tensor of all.
  struct Parts {
    std::map<int64_t, std::vector<float>> of_piece;
    size_t size = 0;
    float other = 0;  // of pieces that have none
  };

  absl::Status AddLinear(const model::LinearLocation& linear) {
    std::vector<uint8_t> scratch;
    AWQD_ASSIGN_OR_RETURN(const HostWeight weight,
                          source_.checkpoint()->Describe(linear, &scratch));
    AWQD_RETURN_IF_ERROR(ValidateBesideCodes(weight));
    const std::string exact = replaced_.paths.contains(linear.path) ? "" : ExactBlockType(weight);
    const std::vector<GgufPlace> places = names_.Find(linear.path);
    if (places.empty()) return NoName();
    for (const GgufPlace& place : places) {
      AWQD_RETURN_IF_ERROR(CheckRows(place.rows, weight.n));
      const int64_t rows = weight.n / place.rows.step;
      GgufTensor& tensor =
          AddPiece(place, {.linear = &linear, .path = linear.path}, {rows, weight.k}, exact);
      AWQD_RETURN_IF_ERROR(SameShape(tensor, {rows, weight.k}));
      if (exact == "NVFP4" && weight.scheme.outer == OuterKind::kOne) {
        AddPart(place, ".scale", {weight.outer[0]}, 1);
      }
      const auto other = replaced_.tensors.find(linear.path + ".bias");
      const std::vector<float>& from =
          other != replaced_.tensors.end() ? other->second : weight.bias;
      if (from.empty()) continue;
      std::vector<float> bias(rows);
      for (int64_t i = 0; i < rows; ++i) bias[i] = from[place.rows.Source(i, rows)];
      AddPart(place, ".bias", std::move(bias), 0);
    }
    return absl::OkStatus();
  }

  absl::Status AddDense(const std::string& name) {
    const model::TensorLocation& place = *source_.tensors().Find(name);
    const model::TensorInfo& info = *place.info;
    const size_t dot = name.rfind('.');
    absl::string_view path = name, last = "";
    if (absl::EndsWith(name, ".weight") || absl::EndsWith(name, ".bias")) {
      path = absl::string_view(name).substr(0, dot);
      last = absl::string_view(name).substr(dot);
    }
    const absl::string_view end = absl::string_view(name).substr(dot == name.npos ? 0 : dot + 1);
    std::vector<GgufPlace> places = names_.Find(path);
    if (names_.known() && (end == "inv_freq" || model::IsWithoutEffect(end))) {
      plan_.left_out.push_back(absl::StrCat("tensor ", Quoted(name), ": llama.cpp has no name"));
      return absl::OkStatus();
    }
    if (name == "scaled_fp8") {
      plan_.left_out.push_back("tensor \"scaled_fp8\": it marks a file of ComfyUI");
      return absl::OkStatus();
    }
    if (places.size() != 1) return model::BadTensor(name, NoName().message());
    if (names_.known() && last.empty()) last = ".weight";
    std::string type = info.dtype;
    if (IsFloatType(type)) {
      const std::string linear = source_.DensePath(name);
      if (info.shape.size() < 2) type = "F32";  // ggml adds and multiplies by these
      if (!linear.empty()) type = DenseType(linear, info);
    } else if (!absl::c_linear_search(kIntegerTypes, type)) {
      return model::BadTensor(name, "got ", Quoted(type, 16),
                              ", expected F16, BF16, F32, F64 or signed integers");
    }
    const std::vector<int64_t> shape = info.shape.empty() ? std::vector<int64_t>{1} : info.shape;
    if (const absl::Status status = CheckRows(places[0].rows, shape[0]); !status.ok()) {
      return model::BadTensor(name, status.message());
    }
    if (const auto it = replaced_.tensors.find(name); it != replaced_.tensors.end()) {
      const auto count = static_cast<int64_t>(it->second.size());
      std::vector<float> values(count);
      for (int64_t i = 0; i < count; ++i) values[i] = it->second[places[0].rows.Source(i, count)];
      AddMade(absl::StrCat(places[0].path, last), shape, values);
      return absl::OkStatus();
    }
    if (shape.size() > (places[0].expert < 0 ? 4 : 3)) {
      return model::BadTensor(name, "got ", shape.size(), " dimensions, expected at most 4");
    }
    GgufTensor& tensor =
        AddPiece(places[0], {.dense = &place, .path = name}, shape, "", std::string(last));
    if (tensor.type != nullptr && tensor.type->name != type) {
      return model::BadTensor(name, "got ", type, ", expected ", tensor.type->name,
                              " as the other experts");
    }
    tensor.type = model::GgufTypeNamed(type);
    return SameShape(tensor, shape);
  }

  // The type of a linear or embedding [N, K] that is no quantised linear.
  std::string DenseType(const std::string& path, const model::TensorInfo& info) const {
    const bool replaced = replaced_.paths.contains(path);
    if ((source_.quantised() && !replaced) || dtype_.empty()) return info.dtype;
    if (!IsBlockType(dtype_)) return dtype_;
    return WhyLeftDense(path, leave_out_).empty() && info.shape[1] % 32 == 0 ? dtype_ : info.dtype;
  }

  // The tensor of that place, which gets one more piece.
  GgufTensor& AddPiece(const GgufPlace& place, Piece piece, std::vector<int64_t> shape,
                       const std::string& exact, const std::string& last = ".weight") {
    const auto [it, fresh] = index_.emplace(place.path + last, plan_.tensors.size());
    if (fresh) {
      plan_.tensors.push_back({.name = place.path + last,
                               .shape = std::move(shape),
                               .rows = place.rows,
                               .experts = place.expert >= 0});
      exact_.push_back(exact);
    }
    GgufTensor& out = plan_.tensors[it->second];
    if (exact_[it->second] != exact) exact_[it->second].clear();
    const auto at = static_cast<size_t>(std::max<int64_t>(0, place.expert));
    if (out.pieces.size() <= at) out.pieces.resize(at + 1);
    if (!out.pieces[at].path.empty() && clash_.empty()) clash_ = piece.path;
    out.pieces[at] = std::move(piece);
    return out;
  }

  void AddPart(const GgufPlace& place, absl::string_view last, std::vector<float> values,
               float other) {
    Parts& parts = parts_[absl::StrCat(place.path, last)];
    parts.size = values.size();
    parts.other = other;
    parts.of_piece[std::max<int64_t>(0, place.expert)] = std::move(values);
  }

  void AddMade(std::string name, std::vector<int64_t> shape, const std::vector<float>& values) {
    if (shape.empty()) shape = {static_cast<int64_t>(values.size())};
    plan_.tensors.push_back({.name = std::move(name),
                             .type = model::GgufTypeNamed("F32"),
                             .shape = std::move(shape),
                             .bytes = RawBytes(values)});
    exact_.emplace_back();
  }

  // Biases and scales of linears, after their pieces are known.
  void AddParts() {
    for (auto& [name, parts] : parts_) {
      const std::string path = name.substr(0, name.rfind('.'));
      const size_t at = index_.at(path + ".weight");
      const GgufTensor& tensor = plan_.tensors[at];
      if (absl::EndsWith(name, ".scale") && exact_[at] != "NVFP4") continue;
      std::vector<float> all;
      for (size_t i = 0; i < tensor.pieces.size(); ++i) {
        std::vector<float>& values = parts.of_piece[static_cast<int64_t>(i)];
        values.resize(parts.size, parts.other);
        all.insert(all.end(), values.begin(), values.end());
      }
      std::vector<int64_t> shape;
      if (tensor.experts) shape.push_back(static_cast<int64_t>(tensor.pieces.size()));
      if (shape.empty() || parts.size > 1) shape.push_back(static_cast<int64_t>(parts.size));
      AddMade(name, std::move(shape), all);
    }
    for (size_t i = 0; i < plan_.tensors.size(); ++i) {
      GgufTensor& tensor = plan_.tensors[i];
      tensor.exact = !exact_[i].empty();
      if (tensor.type == nullptr) {
        tensor.type = model::GgufTypeNamed(tensor.exact ? exact_[i] : dtype_);
      }
    }
  }

  absl::Status Check(const GgufTensor& tensor) {
    if (!names_seen_.insert(tensor.name).second || !clash_.empty()) {
      return model::BadTensor(clash_.empty() ? tensor.name : clash_,
                              "another one has the same place in the file");
    }
    for (size_t i = 0; i < tensor.pieces.size(); ++i) {
      if (!tensor.pieces[i].path.empty()) continue;
      return model::BadTensor(tensor.name, "got no expert ", i, ", expected ", tensor.pieces.size(),
                              " of them");
    }
    if (tensor.shape.empty() || tensor.row_elements() % tensor.type->elements == 0) {
      return absl::OkStatus();
    }
    return Prefixed(absl::StrCat("linear ", Quoted(tensor.pieces[0].path)),
                    BadValue("K", tensor.row_elements(),
                             absl::StrCat("a multiple of ", tensor.type->elements, " (",
                                          tensor.type->name, ")")));
  }

  absl::Status SameShape(const GgufTensor& tensor, const std::vector<int64_t>& shape) const {
    if (tensor.shape == shape) return absl::OkStatus();
    return BadValue("shape", absl::StrCat("[", absl::StrJoin(shape, ", "), "]"),
                    absl::StrCat("[", absl::StrJoin(tensor.shape, ", "), "] as the other experts"));
  }

  static absl::Status CheckRows(const RowOrder& rows, int64_t n) {
    const int64_t multiple = std::max(rows.step, 2 * rows.heads);
    if (n % multiple == 0) return absl::OkStatus();
    return BadValue("rows", n,
                    rows.heads > 0 ? absl::StrCat("those of ", rows.heads, " heads of two halves")
                                   : absl::StrCat("a multiple of ", multiple));
  }

  static absl::Status NoName() {
    return absl::InvalidArgumentError(
        "got a path that llama.cpp has no name for in this architecture, expected one that it has");
  }

  const Model& source_;
  const std::string& dtype_;
  const std::vector<std::string>& leave_out_;
  const Replacement& replaced_;
  const GgufNames& names_;
  GgufPlan plan_;
  std::vector<std::string> exact_;       // of each tensor: its block type; empty: not exact
  std::map<std::string, size_t> index_;  // of tensors with pieces
  std::map<std::string, Parts> parts_;   // by name
  std::set<std::string> names_seen_;
  std::string clash_;  // the path of a piece whose place was taken
};

// --- Rows of a piece in the source's order ---

// The numbers that blocks of Q8_0 or Q4_0 hold.
void DecodeBlocks(bool wide, const uint8_t* from, int64_t count, float* to) {
  for (int64_t at = 0; at < count; at += 32, from += wide ? 34 : 18) {
    const float d = LoadElement(from, DType::kFp16, 0);
    for (int i = 0; i < 32; ++i) {
      const int code =
          wide ? static_cast<int8_t>(from[2 + i]) : (from[2 + i % 16] >> (i / 16 * 4) & 15) - 8;
      to[at + i] = static_cast<float>(code) * d;
    }
  }
}

// Stores rows of FP32 as a type, and adds up the difference where it is asked for. Thread-safe.
class RowEncoder {
 public:
  // `loss` may be null.
  RowEncoder(const GgufTensor& tensor, Difference* loss) : tensor_(tensor), loss_(loss) {}

  absl::Status Encode(int64_t begin, int64_t rows, const float* from, uint8_t* to) {
    Difference loss;
    AWQD_RETURN_IF_ERROR(StoreAs(*tensor_.type, from, begin, rows, tensor_.row_elements(),
                                 /*finite=*/false, to, loss_ == nullptr ? nullptr : &loss));
    if (loss_ == nullptr) return absl::OkStatus();
    const MutexLock lock(&mutex_);
    loss_->norms.Add(loss.norms);
    loss_->largest = std::max(loss_->largest, loss.largest);
    return absl::OkStatus();
  }

 private:
  const GgufTensor& tensor_;
  Mutex mutex_;
  Difference* const loss_;
};

StoreRows EncodedRows(ReadRows read, std::shared_ptr<RowEncoder> encoder, int64_t k) {
  return [read = std::move(read), encoder = std::move(encoder), k](int64_t begin, int64_t end,
                                                                   uint8_t* to) {
    const auto rows = std::make_unique_for_overwrite<float[]>((end - begin) * k);
    AWQD_RETURN_IF_ERROR(read(begin, end, rows.get()));
    return encoder->Encode(begin, end - begin, rows.get(), to);
  };
}

StoreRows RowsOfWeight(HostWeight given, const GgufTensor& tensor,
                       std::shared_ptr<RowEncoder> encoder, bool loss) {
  const absl::string_view type = tensor.type->name;
  if (tensor.exact) {
    const auto blocks = std::make_shared<const BlockRows>(std::move(given), type);
    return [blocks](int64_t begin, int64_t end, uint8_t* to) {
      blocks->Read(begin, end, to);
      return absl::OkStatus();
    };
  }
  const auto weight = std::make_shared<const HostWeight>(std::move(given));
  if (!loss && !IsBlockType(type)) {
    return [weight, type](int64_t begin, int64_t end, uint8_t* to) {
      return FillRows(*weight, FloatTypeNamed(type), begin, end, to);
    };
  }
  const ReadRows read = [weight](int64_t begin, int64_t end, float* to) {
    return FillRows(*weight, DType::kFp32, begin, end, reinterpret_cast<uint8_t*>(to));
  };
  return EncodedRows(read, std::move(encoder), weight->k);
}

// --- Writing ---

template <typename T>
void AppendNumber(T value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string Header(const GgufPlan& plan) {
  std::string out = "GGUF";
  AppendNumber<uint32_t>(3, &out);
  AppendNumber<uint64_t>(plan.tensors.size(), &out);
  AppendNumber<uint64_t>(plan.keys, &out);
  out += plan.metadata;
  int64_t offset = 0;
  for (const GgufTensor& tensor : plan.tensors) {
    AppendNumber<uint64_t>(tensor.name.size(), &out);
    out += tensor.name;
    std::vector<int64_t> shape = tensor.shape;
    if (tensor.experts) {
      shape.insert(shape.begin(), static_cast<int64_t>(tensor.pieces.size()));
    }
    AppendNumber<uint32_t>(shape.size(), &out);
    for (auto it = shape.rbegin(); it != shape.rend(); ++it) AppendNumber<uint64_t>(*it, &out);
    AppendNumber<uint32_t>(tensor.type->number, &out);
    AppendNumber<uint64_t>(offset, &out);
    offset += RoundUp(tensor.total_bytes(), kAlignment);
  }
  out.resize(RoundUp(static_cast<int64_t>(out.size()), kAlignment));
  return out;
}

class Writer {
 public:
  Writer(const Model& source, const GgufPlan& plan, const Replacement& replaced,
         client::OutputFile* file, std::vector<QuantizedLinear>* rounded, const Progress& progress,
         Conversion* report)
      : source_(source),
        plan_(plan),
        replaced_(replaced),
        file_(file),
        rounded_(rounded),
        progress_(progress),
        report_(report) {
    std::vector<const model::LinearLocation*> linears;
    for (const GgufTensor& tensor : plan.tensors) {
      for (const Piece& piece : tensor.pieces) {
        if (piece.linear == nullptr || replaced.paths.contains(piece.path)) continue;
        linears.push_back(piece.linear);
      }
    }
    if (!linears.empty()) weights_.emplace(*source.checkpoint(), std::move(linears));
  }

  absl::Status Write() {
    AWQD_RETURN_IF_ERROR(file_->Append(Header(plan_)));
    for (const GgufTensor& tensor : plan_.tensors) {
      if (tensor.pieces.empty()) AWQD_RETURN_IF_ERROR(file_->Append(tensor.bytes));
      for (const Piece& piece : tensor.pieces) {
        const absl::Status status = WritePiece(tensor, piece);
        const absl::string_view what = piece.linear != nullptr ? "linear " : "tensor ";
        if (!status.ok()) return Prefixed(absl::StrCat(what, Quoted(piece.path)), status);
      }
      const int64_t bytes = tensor.total_bytes();
      AWQD_RETURN_IF_ERROR(file_->Append(std::string(RoundUp(bytes, kAlignment) - bytes, '\0')));
      report_->bytes_after += bytes;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status WritePiece(const GgufTensor& tensor, const Piece& piece) {
    Difference loss;
    std::string scheme, path = piece.path;
    int64_t before = 0;
    AWQD_ASSIGN_OR_RETURN(const StoreRows rows, Open(tensor, piece, &loss, &scheme));
    AWQD_RETURN_IF_ERROR(CopyRows(tensor, rows));
    if (piece.linear != nullptr) {
      before = piece.linear->bytes;
      report_->linears.push_back({.path = path,
                                  .scheme = scheme,
                                  .k = tensor.row_elements(),
                                  .n = tensor.row_count(),
                                  .bytes_before = before,
                                  .bytes_after = tensor.row_count() * tensor.row_bytes(),
                                  .slice = !piece.linear->slice_of.empty(),
                                  .dense = !tensor.exact,
                                  .type = std::string(tensor.type->name)});
    } else {
      before = piece.dense->info->bytes();
      ++report_->carried.tensors;
      report_->carried.tensor_bytes += before;
      path = source_.DensePath(path);
    }
    const bool changed =
        piece.dense == nullptr ? !tensor.exact : piece.dense->info->dtype != tensor.type->name;
    if (rounded_ != nullptr && !path.empty() && (changed || replaced_.paths.contains(path))) {
      rounded_->push_back({path, std::string(tensor.type->name), tensor.row_elements(),
                           tensor.row_count(), loss.norms, loss.largest});
    }
    progress_(done_ += before, source_.tensors().total_bytes());
    return absl::OkStatus();
  }

  absl::StatusOr<StoreRows> Open(const GgufTensor& tensor, const Piece& piece, Difference* loss,
                                 std::string* scheme) {
    const int64_t k = tensor.row_elements();
    const auto encoder = std::make_shared<RowEncoder>(tensor, rounded_ != nullptr ? loss : nullptr);
    const std::string path = piece.linear != nullptr ? piece.path : source_.DensePath(piece.path);
    if (!path.empty() && replaced_.paths.contains(path)) {
      AWQD_ASSIGN_OR_RETURN(ReadRows read, replaced_.open(path));
      return EncodedRows(std::move(read), encoder, k);
    }
    if (piece.linear != nullptr) {
      AWQD_ASSIGN_OR_RETURN(HostWeight weight, weights_->Next());
      *scheme = ToString(weight.scheme);
      if (weight.activations.how != ActivationQuantization::kNone) ++report_->activations;
      return RowsOfWeight(std::move(weight), tensor, encoder, rounded_ != nullptr);
    }
    const model::TensorLocation place = *piece.dense;
    if (place.info->dtype != tensor.type->name) {
      return EncodedRows(RowsOfTensor(place, k), encoder, k);
    }
    return StoreRows([place, bytes = tensor.row_bytes()](int64_t begin, int64_t end, uint8_t* to) {
      return ReadPart(place, begin * bytes, {to, static_cast<size_t>((end - begin) * bytes)});
    });
  }

  static absl::Status FillHalves(const StoreRows& rows, int64_t begin, int64_t end, int64_t bytes,
                                 uint8_t* to) {
    constexpr int64_t kLeast = 256 << 10;  // bytes for a thread of its own
    return RunHalves(begin, end, 8, CeilDiv(kLeast, bytes), [&](int64_t from, int64_t until) {
      return rows(from, until, to + (from - begin) * bytes);
    });
  }

  absl::Status CopyRows(const GgufTensor& tensor, const StoreRows& rows) {
    const RowOrder& order = tensor.rows;
    const int64_t count = tensor.row_count(), bytes = tensor.row_bytes();
    const int64_t unit = std::max<int64_t>(8, order.Unit(count));
    const int64_t row_floats = 4 * tensor.row_elements() * order.step;
    const int64_t step = std::max(unit, kChunkBytes / row_floats / unit * unit);
    for (int64_t begin = 0; begin < count; begin += step) {
      const int64_t end = std::min(count, begin + step), got = end - begin;
      out_.resize(got * bytes);
      if (order.same()) {
        AWQD_RETURN_IF_ERROR(FillHalves(rows, begin, end, bytes, out_.data()));
      } else {
        source_rows_.resize(got * bytes * order.step);
        AWQD_RETURN_IF_ERROR(
            FillHalves(rows, begin * order.step, end * order.step, bytes, source_rows_.data()));
        for (int64_t i = 0; i < got; ++i) {
          const int64_t from = order.Source(begin + i, count) - begin * order.step;
          std::memcpy(out_.data() + i * bytes, source_rows_.data() + from * bytes, bytes);
        }
      }
      AWQD_RETURN_IF_ERROR(file_->Append(absl::Span<const uint8_t>(out_)));
    }
    return absl::OkStatus();
  }

  const Model& source_;
  const GgufPlan& plan_;
  const Replacement& replaced_;
  client::OutputFile* const file_;
  std::vector<QuantizedLinear>* const rounded_;
  const Progress& progress_;
  Conversion* const report_;
  std::optional<ReadAhead> weights_;
  std::vector<uint8_t> out_, source_rows_;
  int64_t done_ = 0;
};

// --- Reading back ---

absl::Status DiffersAt(absl::string_view path, int64_t k, int64_t n, float got, float expected) {
  return absl::InternalError(absl::StrCat("verify: ", Quoted(path), ": element [", k, ", ", n,
                                          "]: got ", got, ", expected ", expected));
}

// Whether `got` is what `type` makes of `want`, one of a block whose largest magnitude is `most`.
bool IsRounding(absl::string_view type, float got, float want, float most) {
  if (IsBlockType(type)) {
    const float error = most / (type == "Q8_0" ? 254 : 8) + most / 512;
    return std::fabs(got - want) <= error;
  }
  return got == RoundTo(FloatTypeNamed(type), want) || (std::isnan(got) && std::isnan(want));
}

absl::Status ComparePiece(const GgufTensor& tensor, const Piece& piece, const Elements& got,
                          const Elements& want, Verification* out) {
  const int64_t k = got.k(), n = got.n();
  if (k != want.k() || n * tensor.rows.step != want.n()) {
    return absl::InternalError(absl::StrCat("verify: ", Quoted(piece.path), ": another shape"));
  }
  const absl::string_view type = tensor.exact ? "F32" : tensor.type->name;
  const int64_t unit = RoundUp(std::max<int64_t>(8, tensor.rows.Unit(n)), 8);
  const int64_t step = tensor.rows.heads > 0 ? unit : RoundUp(std::min(n, got.Step()), 8);
  std::vector<float> left(step * k), right(step * k * tensor.rows.step), most;
  for (int64_t begin = 0; begin < n; begin += step) {
    const int64_t end = std::min(n, begin + step), columns = end - begin;
    const int64_t width = columns * tensor.rows.step, first = begin * tensor.rows.step;
    AWQD_RETURN_IF_ERROR(got.Read(begin, end, left.data()));
    AWQD_RETURN_IF_ERROR(want.Read(first, first + width, right.data()));
    for (int64_t col = 0; col < columns; ++col) {
      const int64_t from = tensor.rows.Source(begin + col, n) - first;
      float largest = 0;
      for (int64_t row = 0; row < k; ++row) {
        if (IsBlockType(type) && row % 32 == 0) {
          largest = 0;
          for (int64_t i = row; i < row + 32; ++i) {
            largest = std::max(largest, std::fabs(right[i * width + from]));
          }
        }
        const float a = left[row * columns + col], b = right[row * width + from];
        if (!IsRounding(type, a, b, largest)) return DiffersAt(piece.path, row, begin + col, a, b);
        out->rounded += a == b || std::isnan(a) ? 0 : 1;
      }
    }
  }
  out->elements += k * n;
  return absl::OkStatus();
}

// A tensor of few elements, whose bytes are known.
absl::Status CompareBytes(const GgufTensor& tensor, const Model& model,
                          absl::Span<const uint8_t> want) {
  const model::TensorLocation* const place = model.tensors().Find(tensor.name);
  std::vector<uint8_t> got(want.size());
  if (place == nullptr || place->info->bytes() != static_cast<int64_t>(want.size())) {
    return absl::InternalError(absl::StrCat("verify: ", Quoted(tensor.name), ": other bytes"));
  }
  AWQD_RETURN_IF_ERROR(ReadPart(*place, 0, absl::MakeSpan(got)));
  if (absl::c_equal(got, want)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("verify: ", Quoted(tensor.name), ": other bytes"));
}

// A tensor that is no linear: a vector, which may be of another type and order, or another one.
absl::Status CompareVector(const GgufTensor& tensor, const Piece& piece, const Model& written,
                           Verification* out) {
  const model::TensorInfo& info = *piece.dense->info;
  std::vector<uint8_t> bytes(info.bytes());
  AWQD_RETURN_IF_ERROR(ReadPart(*piece.dense, 0, absl::MakeSpan(bytes)));
  if (IsFloatType(info.dtype) && tensor.shape.size() < 2) {
    const int64_t count = tensor.row_count();
    std::vector<float> values(count);
    for (int64_t i = 0; i < count; ++i) {
      values[i] =
          LoadElement(bytes.data(), FloatTypeNamed(info.dtype), tensor.rows.Source(i, count));
    }
    bytes = RawBytes(values);
  }
  AWQD_RETURN_IF_ERROR(CompareBytes(tensor, written, bytes));
  ++out->tensors;
  out->tensor_bytes += static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

// A dense tensor, or the slice of one, of a file that was written.
absl::StatusOr<Elements> DenseSlice(const Model& model, const GgufTensor& tensor, size_t index,
                                    model::TensorInfo* info) {
  const model::TensorLocation* const place = model.tensors().Find(tensor.name);
  if (place == nullptr) return absl::NotFoundError("it was not written");
  const int64_t n = tensor.row_count(), bytes = n * tensor.row_bytes();
  *info = *place->info;
  info->begin += static_cast<int64_t>(index) * bytes;
  info->end = info->begin + bytes;
  return Elements(DenseWeight{.k = tensor.row_elements(), .n = n, .tensor = {place->file, info}});
}

}  // namespace

bool IsGgufName(absl::string_view path) { return absl::EndsWith(path, ".gguf"); }

absl::Status StoreAs(const model::GgufType& type, const float* from, int64_t first, int64_t rows,
                     int64_t k, bool finite, uint8_t* to, Difference* loss) {
  const bool blocks = IsBlockType(type.name);
  const DType dtype = FloatTypeNamed(type.name);
  std::vector<float> stored(loss != nullptr ? k : 0);
  for (int64_t row = 0; row < rows; ++row, from += k, to += k / type.elements * type.bytes) {
    bool good = blocks ? QuantizeBlocks(type.name, from, k, to) : StoreFloats(from, k, dtype, to);
    if (good && loss != nullptr) {
      if (blocks) {
        DecodeBlocks(type.name == "Q8_0", to, k, stored.data());
      } else {
        for (int64_t i = 0; i < k; ++i) stored[i] = LoadElement(to, dtype, i);
      }
      loss->AddNorms(stored.data(), from, k);
      good = !finite || std::isfinite(loss->norms.b);
    }
    if (good) continue;
    return BadValue(
        "elements", absl::StrCat("one in row ", first + row, " that is not finite, or too large"),
        absl::StrCat(finite ? "finite " : "", "numbers within the range of ", type.name));
  }
  return absl::OkStatus();
}

int64_t GgufTensor::row_count() const {
  return shape.size() < 2 ? Product(shape)
                          : Product(absl::MakeConstSpan(shape).first(shape.size() - 1));
}

int64_t GgufTensor::total_bytes() const {
  const auto count = static_cast<int64_t>(pieces.size());
  return row_count() * row_bytes() * std::max<int64_t>(1, count);
}

absl::StatusOr<GgufPlan> PlanGguf(const Model& source, const GgufOptions& options,
                                  const Replacement& replaced) {
  if (source.tensors().gguf()) {
    return Invalid(source.folder().name, ": got a GGUF file, expected a model in another format");
  }
  AWQD_ASSIGN_OR_RETURN(const nlohmann::ordered_json config, ReadConfig(source));
  AWQD_ASSIGN_OR_RETURN(const GgufNames names, GgufNames::FromConfig(config));
  return Planner(source, options, replaced, names).Plan();
}

absl::Status WriteGguf(const Model& source, const GgufPlan& plan, const Replacement& replaced,
                       std::vector<QuantizedLinear>* rounded, const Progress& progress,
                       FolderWriter* out, Conversion* report) {
  AWQD_ASSIGN_OR_RETURN(const auto file, out->CreateFile(kGgufFile));
  report->bytes_before = source.tensors().total_bytes();
  absl::c_copy(plan.left_out, std::back_inserter(report->carried.left_out));
  AWQD_RETURN_IF_ERROR(
      Writer(source, plan, replaced, file.get(), rounded, progress, report).Write());
  AWQD_RETURN_IF_ERROR(file->Close());
  if (out->single_file()) return absl::OkStatus();
  return RewriteRest(source, kGgufTarget, {}, "", out, &report->carried);
}

absl::StatusOr<Verification> VerifyGguf(const Model& source, const GgufPlan& plan,
                                        const std::string& written, const Carried& carried,
                                        const Progress& progress) {
  AWQD_ASSIGN_OR_RETURN(const Model other, Model::Open(written));
  Verification out;
  int64_t done = 0;
  for (const GgufTensor& tensor : plan.tensors) {
    if (tensor.pieces.empty()) AWQD_RETURN_IF_ERROR(CompareBytes(tensor, other, tensor.bytes));
    for (size_t i = 0; i < tensor.pieces.size(); ++i) {
      const Piece& piece = tensor.pieces[i];
      const std::string path = piece.linear != nullptr ? piece.path : source.DensePath(piece.path);
      if (path.empty()) {
        AWQD_RETURN_IF_ERROR(CompareVector(tensor, piece, other, &out));
        continue;
      }
      const std::string stem = tensor.name.substr(0, tensor.name.rfind('.'));
      const std::string made =
          tensor.experts ? model::PathOfExpert(stem, static_cast<int64_t>(i)) : stem;
      model::TensorInfo info;
      const bool blocks = tensor.type->elements > 1;
      AWQD_ASSIGN_OR_RETURN(const Elements got, blocks ? ReadElements(other, made)
                                                       : DenseSlice(other, tensor, i, &info));
      AWQD_ASSIGN_OR_RETURN(const Elements want, ReadElements(source, path));
      AWQD_RETURN_IF_ERROR(ComparePiece(tensor, piece, got, want, &out));
      out.biases += static_cast<int64_t>(want.bias().size());
      if (piece.linear != nullptr) ++out.linears;
      done += piece.linear != nullptr ? piece.linear->bytes : piece.dense->info->bytes();
      progress(done, source.tensors().total_bytes());
    }
  }
  AWQD_RETURN_IF_ERROR(CompareFiles(source.folder(), other.folder(), carried, &out));
  return out;
}

}  // namespace awqd::tools
