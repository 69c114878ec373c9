// Which weights of a model are the projections of a gated MLP, by their paths.
#pragma once

#include <set>
#include <string>

#include "absl/strings/string_view.h"

namespace awqd::model {

enum class MlpRole { kNone, kGateOrUp, kDown };

// `paths`: of all the model's weights. A component of the path is gate_proj, up_proj or down_proj,
// or one of a row of the table in mlp_paths.cc, and the other two of its row are there too.
MlpRole MlpRoleOf(absl::string_view path, const std::set<std::string, std::less<>>& paths);

}  // namespace awqd::model
