"""The engine: layout, device, comm, buffer, group, order, context, hooks, module, in order of import."""
