// ReloadUnderCalls: a model is reloaded while it is called, and every answer must be right.
#pragma once

#include <functional>
#include <string>

#include "client/awqd_client.h"

namespace awqd {

// Four threads repeat `answers_right`, a call and the check of its answer, while `model` is loaded
// `loads` times and until `right` answers came. Then it unloads `model`: no device may still hold
// weights. The server has no other model.
void ReloadUnderCalls(client::Client& client, const std::string& model, int loads, int right,
                      const std::function<bool()>& answers_right);

}  // namespace awqd
