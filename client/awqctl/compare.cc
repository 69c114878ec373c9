// awqctl compare: two .npy files, one verdict.
#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "client/awqctl/commands.h"
#include "client/files/npy.h"
#include "kernels/base/status.h"
#include "nlohmann/json.hpp"

namespace awqd::awqctl {
namespace {

struct Difference {
  double max_absolute = 0;  // infinite where one side is NaN or another infinity, or past double
  int64_t max_at = 0;       // flat index of it
  double relative = 0;      // |A - B| / |B|; 0 only where no value differs
  int64_t different_elements = 0;
  int64_t in_bits_alone = 0;  // of them: a NaN with other bits, a zero with another sign
};

// For sums of squares: no difference of two doubles, and no square of one, leaves its range.
using Wide = long double;
static_assert(std::numeric_limits<Wide>::max_exponent >= 16384);

// NaN equals NaN here: the question is whether two computations agree.
Wide ElementDifference(double a, double b) {
  if (std::isnan(a) && std::isnan(b)) return 0;
  if (a == b) return 0;
  const Wide difference = std::fabs(Wide{a} - Wide{b});
  return std::isfinite(difference) ? difference : std::numeric_limits<Wide>::infinity();
}

// Rounded, but up to the smallest double where 0 would say that no value differs.
double RelativeError(Wide difference_norm, Wide expected_norm) {
  if (difference_norm == 0) return 0;
  const auto relative = static_cast<double>(std::sqrt(difference_norm / expected_norm));
  return std::max(relative, std::numeric_limits<double>::denorm_min());
}

Difference Measure(const client::NpyArray& actual, const client::NpyArray& expected) {
  const bool same_type = actual.type == expected.type;
  const size_t size = static_cast<size_t>(client::SizeOf(actual.type));
  Difference result;
  Wide max_absolute = 0, difference_norm = 0, expected_norm = 0;  // the norms squared
  const size_t count = actual.bytes.size() / size;
  for (size_t i = 0; i < count; ++i) {
    const double a = actual.ValueAt(i), b = expected.ValueAt(i);
    const Wide difference = ElementDifference(a, b);
    if (difference > max_absolute) {
      max_absolute = difference;
      result.max_at = static_cast<int64_t>(i);
    }
    difference_norm += difference * difference;
    if (std::isfinite(b)) expected_norm += Wide{b} * Wide{b};
    const bool same =
        same_type ? actual.bytes.compare(i * size, size, expected.bytes, i * size, size) == 0
                  : difference == 0;
    result.different_elements += same ? 0 : 1;
    result.in_bits_alone += !same && difference == 0 ? 1 : 0;
  }
  result.max_absolute = static_cast<double>(max_absolute);
  result.relative = RelativeError(difference_norm, expected_norm);
  return result;
}

void Print(const Flags& flags, const Difference& difference, size_t elements, bool same,
           Console& console) {
  if (flags.json) {
    const auto number = [](double value) {
      return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json("Infinity");
    };
    nlohmann::ordered_json json = {{"same", same},
                                   {"relative_error", number(difference.relative)},
                                   {"max_absolute_error", number(difference.max_absolute)},
                                   {"max_at", difference.max_at},
                                   {"different_elements", difference.different_elements},
                                   {"different_in_bits_alone", difference.in_bits_alone},
                                   {"elements", elements}};
    console.out << json.dump(2) << "\n";
    return;
  }
  console.out << absl::StrFormat(
      "%s: relative error %.3g, max absolute error %.3g at element %d, %d of %d elements differ\n",
      same ? "same" : "different", difference.relative, difference.max_absolute, difference.max_at,
      difference.different_elements, elements);
  if (difference.in_bits_alone == 0) return;
  console.out << absl::StrFormat(
      "%d of them differ in a NaN's bits or a zero's sign alone: %s\n", difference.in_bits_alone,
      flags.bit_exact ? "--bit_exact counts them"
                      : "the relative error takes such elements for equal, --bit_exact does not");
}

}  // namespace

absl::StatusOr<int> Compare(const Flags& flags, Console& console) {
  AWQD_ASSIGN_OR_RETURN(const auto actual, client::ReadNpy(flags.actual));
  AWQD_ASSIGN_OR_RETURN(const auto expected, client::ReadNpy(flags.expected));
  const bool bit_exact = flags.bit_exact;
  if (actual.shape != expected.shape || (bit_exact && actual.type != expected.type)) {
    console.err << "awqctl: " << flags.actual << " is " << client::Descr(actual.type) << " "
                << client::ShapeString(actual.shape) << ", " << flags.expected << " is "
                << client::Descr(expected.type) << " " << client::ShapeString(expected.shape)
                << "\n";
    return kDiffers;
  }
  const Difference difference = Measure(actual, expected);
  const bool same = bit_exact ? difference.different_elements == 0
                              : difference.relative <= *flags.max_relative_error;
  const int64_t size = client::SizeOf(actual.type);
  Print(flags, difference, actual.bytes.size() / static_cast<size_t>(size), same, console);
  if (same) return kOk;
  console.err << "awqctl: " << flags.actual << " differs from " << flags.expected << "\n";
  return kDiffers;
}

}  // namespace awqd::awqctl
