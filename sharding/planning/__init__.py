"""The planner for models: tables of modules, real machines, plans as `ShardingPlan`."""
