// The device of kernel tests, and weights prepared so that one row must serve them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/plan/plan.h"
#include "kernels/weight.h"

namespace awqd::testing {

// Opened once: AWQD_TEST_DEVICE ("cpu", "cuda:0"), or the CPU if it is not set. Ends the process
// with the reason if the device cannot be opened.
Device& TestDevice();

// True with AWQD_TEST_FULL=1: more shapes, more token counts.
bool FullRun();

// The row's name for a test: "cpu_qmatmul_a16_fused".
std::string TestName(const KernelRow& row);

// `row` and the rows of the other operation that read its layout, so that Select has no choice.
std::vector<const KernelRow*> OnlyRow(const KernelRow& row);

// Prepares the weight for `row` alone.
absl::StatusOr<std::shared_ptr<const DeviceWeight>> PrepareFor(const KernelRow& row,
                                                               const HostWeight& weight,
                                                               Device& device);

}  // namespace awqd::testing
