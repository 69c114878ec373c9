// KV4: validates arguments and calls the device's backend.
#include "kernels/kv4.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/backends.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"

namespace awqd {
namespace {

absl::Status CheckAtLeast(absl::string_view name, int64_t got, int64_t least) {
  if (got >= least) return absl::OkStatus();
  return BadValue(absl::StrCat("kv4 ", name), got, absl::StrCat(least, " or more"));
}

absl::Status CheckShape(const Kv4Shape& shape) {
  AWQD_RETURN_IF_ERROR(CheckAtLeast("tokens", shape.tokens, 0));
  AWQD_RETURN_IF_ERROR(CheckAtLeast("heads", shape.heads, 1));
  AWQD_RETURN_IF_ERROR(CheckAtLeast("head_dim", shape.head_dim, 1));
  // Bytes in FP32, and sums with a block of rows, must not overflow.
  std::optional<int64_t> elements = CheckedMul(shape.tokens, shape.heads);
  if (elements) elements = CheckedMul(*elements, shape.head_dim);
  if (elements && *elements <= int64_t{1} << 56) return absl::OkStatus();
  return BadValue("kv4 shape",
                  absl::StrCat("[", shape.tokens, ", ", shape.heads, ", ", shape.head_dim, "]"),
                  "2^56 elements or fewer");
}

absl::Status CheckFloating(absl::string_view name, DType got) {
  if (IsFloating(got)) return absl::OkStatus();
  return BadValue(absl::StrCat("kv4 ", name, " dtype"), Name(got), "FP16, BF16 or FP32");
}

absl::Status CheckScaleDtype(DType got) {
  if (got == DType::kFp16 || got == DType::kFp32) return absl::OkStatus();
  return BadValue("kv4 scale dtype", Name(got), "FP16 or FP32");
}

absl::Status CheckPointer(absl::string_view name, const void* pointer) {
  if (pointer != nullptr) return absl::OkStatus();
  return BadValue(absl::StrCat("kv4 ", name), "null", "memory of the device");
}

absl::Status Validate(const Kv4StoreArgs& args) {
  AWQD_RETURN_IF_ERROR(CheckShape(args.shape));
  AWQD_RETURN_IF_ERROR(CheckFloating("x", args.x_dtype));
  return CheckScaleDtype(args.scale_dtype);
}

absl::Status Validate(const Kv4LoadArgs& args) {
  AWQD_RETURN_IF_ERROR(CheckShape(args.shape));
  AWQD_RETURN_IF_ERROR(CheckScaleDtype(args.scale_dtype));
  AWQD_RETURN_IF_ERROR(CheckFloating("output", args.out_dtype));
  if (args.form == Kv4Form::kFused && args.out_dtype != DType::kFp16) {
    return BadValue("kv4 output dtype", Name(args.out_dtype), "FP16 for the fused form");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Kv4Store(const Kv4StoreArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(Validate(args));
  if (args.shape.tokens == 0) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(CheckPointer("x", args.x));
  AWQD_RETURN_IF_ERROR(CheckPointer("codes", args.codes));
  const bool computed = args.per == Kv4Per::kRow;
  AWQD_RETURN_IF_ERROR(CheckPointer("scale", computed ? args.scale : args.given_scale));
  AWQD_RETURN_IF_ERROR(CheckPointer("zero", computed ? args.zero : args.given_zero));
  return Kv4Of(device).store(args, device.backend(), stream);
}

absl::Status Kv4Load(const Kv4LoadArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(Validate(args));
  if (args.shape.tokens == 0) return absl::OkStatus();
  AWQD_RETURN_IF_ERROR(CheckPointer("codes", args.codes));
  AWQD_RETURN_IF_ERROR(CheckPointer("scale", args.scale));
  AWQD_RETURN_IF_ERROR(CheckPointer("zero", args.zero));
  AWQD_RETURN_IF_ERROR(CheckPointer("output", args.out));
  return Kv4Of(device).load(args, device.backend(), stream);
}

}  // namespace awqd
