"""What a learner types and opens: the `course` command, exercises and their judge, doctor, notebooks."""
