// The reasons why a row cannot serve a weight on a device.
#include "absl/strings/str_cat.h"
#include "kernels/plan/plan.h"

namespace awqd {
namespace {

std::string Architecture(int arch) { return absl::StrCat("sm_", arch); }

std::string WhyNotDevice(const KernelRow& row, const DeviceInfo& device) {
  if (row.device != device.kind) {
    return row.device == DeviceKind::kCpu ? "runs on the CPU only" : "runs on CUDA devices only";
  }
  if (device.arch < row.min_arch) {
    return absl::StrCat("needs ", Architecture(row.min_arch), ", the device is ",
                        Architecture(device.arch));
  }
  if (row.max_arch != 0 && device.arch > row.max_arch) {
    return absl::StrCat("built for ", Architecture(row.max_arch), " at most, the device is ",
                        Architecture(device.arch));
  }
  const bool is_exact = row.op == Op::kDequantize || row.op == Op::kIntegerMatmul;
  if (device.batch_invariant && !is_exact && !row.batch_invariant) {
    return "its sums depend on the batch";
  }
  return "";
}

bool Has(uint32_t mask, uint32_t of) { return (mask & of) != 0; }

std::string WhyNotCode(const Claims& claims, const QuantizationScheme& d) {
  if (!Has(claims.codes, MaskOf(d.code))) {
    return absl::StrCat("has no codes like those of ", ToString(d));
  }
  if (d.is_integer() && (claims.bits >> d.bits & 1) == 0) {
    return absl::StrCat("has no ", d.bits, "-bit codes");
  }
  return "";
}

std::string WhyNotZero(const Claims& claims, const QuantizationScheme& d) {
  if (Has(claims.zeros, MaskOf(d.zero_kind))) return "";
  switch (d.zero_kind) {
    case ZeroKind::kConstant:
      return "needs stored zero points";
    case ZeroKind::kStored:
      return "takes no zero points";
    case ZeroKind::kRealBefore:
    case ZeroKind::kRealAfter:
      break;
  }
  return "takes no real zeros";
}

std::string WhyNotScale(const Claims& claims, const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  if (d.scale_dtype && !Has(claims.scales, MaskOf(*d.scale_dtype))) {
    return absl::StrCat("takes no ", Name(*d.scale_dtype), " scales");
  }
  if (d.block_cols != 1 && d.scale_dtype && !claims.column_blocks) {
    return "takes one scale per column at least";
  }
  if (shape.group_rows() != shape.k && shape.group_rows() % claims.group_multiple != 0) {
    return absl::StrCat("group size ", shape.group_rows(), " is not a multiple of ",
                        claims.group_multiple);
  }
  return "";
}

}  // namespace

std::string WhyNot(const KernelRow& row, const WeightShape& shape, const DeviceInfo& device) {
  if (std::string why = WhyNotDevice(row, device); !why.empty()) return why;
  if (std::string why = WhyNotCode(row.claims, shape.scheme); !why.empty()) return why;
  if (std::string why = WhyNotZero(row.claims, shape.scheme); !why.empty()) return why;
  if (std::string why = WhyNotScale(row.claims, shape); !why.empty()) return why;
  if (row.op == Op::kIntegerMatmul) {
    if (std::string why = WhyNoIntegers(shape); !why.empty()) return why;
  }
  if (row.op == Op::kQuantizedActivations) {
    if (std::string why = WhyNoQuantizedActivations(shape); !why.empty()) return why;
  }
  if (row.layout != nullptr) {
    if (std::string why = row.layout->refuses(shape); !why.empty()) {
      return absl::StrCat("layout ", row.layout->name, ": ", why);
    }
  }
  return row.refuses != nullptr ? row.refuses(shape, device) : "";
}

}  // namespace awqd
