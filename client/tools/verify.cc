// Reading back.
#include "client/tools/verify.h"

#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/tools/diff.h"
#include "client/tools/elements.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

absl::Status Differs(absl::string_view what, absl::string_view how) {
  return absl::InternalError(absl::StrCat("verify: ", Quoted(what), ": ", how));
}

bool SameFloats(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (Distance(a[i], b[i]) != 0) return false;
  }
  return true;
}

float RoundedTo(float value, DType type) {
  if (type == DType::kFp16) return HalfToFloat(FloatToHalf(value));
  return type == DType::kBf16 ? Bf16ToFloat(FloatToBf16(value)) : value;
}

bool SameBits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

// That every element of `got`, of type `type`, is the rounding of that of `want`. FP32: that it is
// that of `want`.
absl::Status CompareRounded(const std::string& path, const Elements& got, const Elements& want,
                            DType type, Verification* out) {
  const int64_t step = want.Step(), k = want.k();
  std::vector<float> left(step * k), right(step * k);
  for (int64_t begin = 0; begin < want.n(); begin += step) {
    const int64_t end = std::min(want.n(), begin + step), columns = end - begin;
    AWQD_RETURN_IF_ERROR(got.Read(begin, end, left.data()));
    AWQD_RETURN_IF_ERROR(want.Read(begin, end, right.data()));
    for (int64_t i = 0; i < k * columns; ++i) {
      const float rounded = RoundedTo(right[i], type);
      if (!SameBits(left[i], rounded)) {
        return Differs(path, absl::StrCat("element [", i / columns, ", ", begin + i % columns,
                                          "]: got ", left[i], ", expected ", rounded));
      }
      out->rounded += SameBits(rounded, right[i]) ? 0 : 1;
    }
  }
  out->elements += k * want.n();
  return absl::OkStatus();
}

absl::Status CompareLinear(const Model& source, const Model& written, const std::string& path,
                           bool dense, Verification* out) {
  if (!dense && written.FindLinear(path) == nullptr) return Differs(path, "it was not written");
  AWQD_ASSIGN_OR_RETURN(const Elements want, ReadElements(source, path));
  AWQD_ASSIGN_OR_RETURN(const Elements got, ReadElements(written, path));
  if (got.k() != want.k() || got.n() != want.n()) return Differs(path, "another shape");
  if (!SameFloats(got.bias(), want.bias())) return Differs(path, "another bias");
  const DType type = dense ? FloatTypeNamed(got.scheme()) : DType::kFp32;
  AWQD_RETURN_IF_ERROR(CompareRounded(path, got, want, type, out));
  ++out->linears;
  out->biases += static_cast<int64_t>(want.bias().size());
  return absl::OkStatus();
}

absl::Status CompareTensors(const Model& source, const Model& written, Verification* out) {
  for (const auto& [name, place] : source.tensors().all()) {
    if (source.IsPart(name)) continue;
    const model::TensorLocation* const other = written.tensors().Find(name);
    if (other == nullptr) return Differs(name, "it was not copied");
    AWQD_ASSIGN_OR_RETURN(const bool same, SameBytes(*other, place));
    if (!same) return Differs(name, "other bytes");
    ++out->tensors;
    out->tensor_bytes += place.info->bytes();
  }
  return absl::OkStatus();
}

absl::Status CompareFiles(const Folder& source, const Folder& written, const Carried& carried,
                          Verification* out) {
  for (const std::string& name : carried.files) {
    AWQD_ASSIGN_OR_RETURN(const model::File a, source.root.OpenFile(source.PathOf(name)));
    AWQD_ASSIGN_OR_RETURN(const model::File b, written.root.OpenFile(written.PathOf(name)));
    AWQD_ASSIGN_OR_RETURN(const bool same, SameBytes(a, b));
    if (!same) return Differs(name, "other bytes");
    ++out->files;
    out->file_bytes += a.size();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Verification> Verify(const Model& source, const std::string& written, bool dense,
                                    const Carried& carried, const Progress& progress) {
  AWQD_ASSIGN_OR_RETURN(const Model other, Model::Open(written));
  const auto linears = source.checkpoint()->linears();
  if (dense == other.quantised()) return Differs(written, "settings of quantisation");
  if (!dense) {
    AWQD_RETURN_IF_ERROR(other.checkpoint().status());
    if (other.checkpoint()->linears().size() != linears.size()) {
      return Differs(written, absl::StrCat("got ", other.checkpoint()->linears().size(),
                                           " linears, expected ", linears.size()));
    }
  }
  Verification out;
  int64_t done = 0;
  for (const model::LinearLocation& linear : linears) {
    AWQD_RETURN_IF_ERROR(CompareLinear(source, other, linear.path, dense, &out));
    done += linear.bytes;
    progress(done, source.tensors().total_bytes());
  }
  AWQD_RETURN_IF_ERROR(CompareTensors(source, other, &out));
  AWQD_RETURN_IF_ERROR(CompareFiles(source.folder(), other.folder(), carried, &out));
  return out;
}

nlohmann::ordered_json ToJson(const Verification& verification) {
  return {{"linears", verification.linears},
          {"elements_bit_for_bit", verification.elements - verification.rounded},
          {"elements_rounded_once", verification.rounded},
          {"bias_elements", verification.biases},
          {"other_tensors", verification.tensors},
          {"other_tensor_bytes", verification.tensor_bytes},
          {"files", verification.files},
          {"file_bytes", verification.file_bytes}};
}

}  // namespace awqd::tools
