// awqctl mlp: a gated MLP in one call.
#include <utility>

#include "client/awqctl/commands.h"
#include "client/awqctl/product.h"

namespace awqd::awqctl {

int Mlp(const Flags& flags, client::Client& client, Console& console) {
  v1::GatedMlpRef mlp;
  mlp.set_model(flags.model);
  mlp.set_path(flags.weight);
  mlp.set_gate(flags.gate);
  mlp.set_up(flags.up);
  mlp.set_down(flags.down);
  ProductPaths paths = PathsOfMlp(flags.weight);
  if (!flags.gate.empty()) paths.first = flags.gate;
  if (!flags.down.empty()) paths.last = flags.down;
  return RunProduct(flags, client, console, paths, [&](Operands operands) {
    return client.GatedMlp(
        {.mlp = mlp,
         .activations = std::move(operands.activations),
         .routing = std::move(operands.routing),
         .output_dtype = flags.output_dtype,
         .path = flags.path,
         .activation_function =
             flags.activation_function == v1::NONE ? v1::SILU : flags.activation_function,
         .shared_activations = std::move(operands.shared_activations),
         .shared_output = std::move(operands.shared_output)},
        Deadline(flags, absl::Seconds(60)));
  });
}

}  // namespace awqd::awqctl
