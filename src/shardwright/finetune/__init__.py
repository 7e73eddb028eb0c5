"""Fine-tuning a model of Hugging Face from a recipe: the job behind ``shardwright train`` with [base]."""
