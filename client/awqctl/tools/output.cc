// Output that several commands share.
#include "client/awqctl/tools/output.h"

#include "client/remove_on_signal.h"

namespace awqd::awqctl {

void PrintJson(const nlohmann::ordered_json& json, Console& console) {
  console.out << json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

void PrintCarried(const tools::Carried& carried, Console& console) {
  for (const std::string& name : carried.left_out) {
    console.out << "not carried along: " << Printable(name) << "\n";
  }
  console.out << "carried along: " << carried.tensors << " tensors, " << Bytes(carried.tensor_bytes)
              << "; " << carried.files.size() << " files\n";
}

void PrintZeroNote(int64_t linears, Console& console) {
  if (linears == 0) return;
  console.out << "note: " << linears
              << " linears have a zero point of 0, which GPTQModel and awqd read as it is, and "
                 "AutoGPTQ's own kernels as 2^bits\n";
}

std::shared_ptr<void> RemovedOnSignal(const std::string& path) {
  return std::make_shared<client::RemoveOnSignal>(path);
}

}  // namespace awqd::awqctl
