// Roles: what an identity may do, and what a method asks of its callers.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace awqd::security {

enum class Role : uint8_t {
  kInfer,    // compute: products, Dequantize, the cache's codes
  kRead,     // look: models, weights' descriptions, the server's facts, reflection
  kAdmin,    // change: load and unload models; look at who is connected
  kMetrics,  // read metrics
};
inline constexpr int kRoles = 4;

// "infer", "read", "admin", "metrics".
absl::string_view Name(Role role);

// No role implies another.
class Roles {
 public:
  constexpr Roles() = default;
  constexpr void Add(Role role) { bits_ |= 1u << static_cast<int>(role); }
  constexpr bool Has(Role role) const { return (bits_ >> static_cast<int>(role) & 1u) != 0; }
  constexpr bool empty() const { return bits_ == 0; }
  bool operator==(const Roles&) const = default;

 private:
  uint8_t bits_ = 0;
};

// "infer,read" -> both. INVALID_ARGUMENT says what was got and expected.
absl::StatusOr<Roles> ParseRoles(absl::string_view text);
std::string ToString(Roles roles);

// What a method asks for, stated where it is registered. Without identities (Options::tokens) all
// but kModelControl are open to everybody.
enum class Need : uint8_t {
  kInfer,
  kRead,
  kMetrics,
  kAdmin,
  kModelControl,  // what Options::model_control says
  kIdentity,      // any role
  kHealth,        // nothing while Options::open_health, otherwise any role
};

}  // namespace awqd::security
