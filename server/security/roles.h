// Roles: what an identity may do, and what a method needs of its callers.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace awqd::security {

enum class Role : uint8_t {
  kInfer,    // compute: products, Dequantize, codes of the KV cache
  kRead,     // read: models, metadata of weights, the server's state, reflection
  kAdmin,    // administer: load and unload models, list connections
  kMetrics,  // read metrics
  kAttach,   // map the memory of weights
};
inline constexpr int kRoles = 5;

// Returns "infer", "read", "admin", "metrics" or "attach".
absl::string_view Name(Role role);

// A set of roles. No role implies another.
class Roles {
 public:
  constexpr Roles() = default;
  constexpr void Insert(Role role) { bits_ |= 1u << static_cast<int>(role); }
  constexpr bool Has(Role role) const { return (bits_ >> static_cast<int>(role) & 1u) != 0; }
  bool operator==(const Roles&) const = default;

 private:
  uint8_t bits_ = 0;
};

// Parses a list such as "infer,read". INVALID_ARGUMENT names the wrong word and the known roles.
absl::StatusOr<Roles> ParseRoles(absl::string_view text);
std::string ToString(Roles roles);

// The needs of a method, stated where the method is registered. Without identities
// (Options::tokens) every method but those of kModelControl is open to everybody.
enum class Need : uint8_t {
  kInfer,
  kRead,
  kMetrics,
  kAttach,
  kAdmin,
  kModelControl,  // as Options::model_control says
  kIdentity,      // any role
  kHealth,        // nothing with Options::open_health, else any role
};

}  // namespace awqd::security
