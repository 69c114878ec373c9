// What the commands that look into model folders, or write one, print alike.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "client/awqctl/console.h"
#include "client/tools/rewrite.h"

namespace awqd::awqctl {

// Names of files need not be UTF-8, which JSON has to be.
void PrintJson(const nlohmann::ordered_json& json, Console& console);

// Tensors and files that came along, files that did not.
void PrintCarried(const tools::Carried& carried, Console& console);

// That some linears of a GPTQ checkpoint have a zero point of 0. Nothing for none.
void PrintZeroNote(int64_t linears, Console& console);

// A tools::Guard: the path is removed when a signal ends the process.
std::shared_ptr<void> RemovedOnSignal(const std::string& path);

}  // namespace awqd::awqctl
