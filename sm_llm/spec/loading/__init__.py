"""From a recipe, a file or a mapping to one checked specification that knows its origins."""
