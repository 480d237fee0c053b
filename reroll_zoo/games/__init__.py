"""Games on a grid."""
