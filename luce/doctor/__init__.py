"""`luce doctor`: checks on the user's own machine what luce promises.

    checks.py      a check, and the report of all
    nvidia_smi.py  what nvidia-smi says of the GPUs
    machine.py     CPU, memory, build, GPU; the memory's bandwidth as measured
    kernels.py     the kernels against known answers
    mixture.py     the small model as a mixture, which has the same answers
    tokens.py      the same tokens: by rows, with drafts, of requests together, behind kept prompts
    steps.py       what a step costs by rows
    run.py         all of them in order
    cli.py         the command
"""
