// Opens the device that the environment names, and narrows the registry to one row.
#include "tests/testing/test_device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"

namespace awqd::testing {

Device& TestDevice() {
  static Device* const device = [] {
    const char* spec = std::getenv("AWQD_TEST_DEVICE");
    auto opened = OpenDevice(spec == nullptr ? "cpu" : spec, {});
    if (!opened.ok()) {
      std::fprintf(stderr, "AWQD_TEST_DEVICE: %s\n", opened.status().ToString().c_str());
      std::exit(2);
    }
    return std::move(opened).value().release();
  }();
  return *device;
}

bool FullRun() {
  const char* full = std::getenv("AWQD_TEST_FULL");
  return full != nullptr && std::strcmp(full, "1") == 0;
}

std::string TestName(const KernelRow& row) {
  const absl::string_view work = row.op == Op::kDequantize             ? "dequantize_op"
                                 : row.op == Op::kIntegerMatmul        ? "integers"
                                 : row.op == Op::kQuantizedActivations ? "quantized"
                                 : row.op == Op::kGroupedMatmul        ? "grouped"
                                 : row.op == Op::kGroupedFloat8        ? "grouped_float8"
                                                                       : Name(row.path);
  std::string out = absl::StrCat(row.name, "_", work);
  for (char& c : out) {
    if (!absl::ascii_isalnum(c)) c = '_';
  }
  return out;
}

std::vector<const KernelRow*> OnlyRow(const KernelRow& row) {
  std::vector<const KernelRow*> out = {&row};
  for (const KernelRow* other : AllKernels()) {
    // A row that reads any layout (the dense path) needs rows that read one.
    const bool reads_any = row.layout == nullptr && row.priority >= 0;
    const bool same_layout = reads_any || other->layout == row.layout || other->layout == nullptr;
    // Rows of kMatmul multiply activations that were rounded to E4M3 too, where no other does.
    const bool instead = (row.op == Op::kMatmul && other->op == Op::kFloat8Activations) ||
                         (row.op == Op::kGroupedMatmul && other->op == Op::kGroupedFloat8);
    if (other->op != row.op && other->device == row.device && same_layout && !instead) {
      out.push_back(other);
    }
  }
  return out;
}

absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareFor(const KernelRow& row,
                                                               const HostWeight& weight,
                                                               Device& device) {
  return PrepareWeight(weight, device, OnlyRow(row));
}

}  // namespace awqd::testing
